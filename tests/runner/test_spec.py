from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from runner.errors import SpecError
from runner.spec import parse_spec
from workers.engine.config import EngineConfig, SpeculationConfig
from workers.settings import engine_config

MINIMAL: dict[str, Any] = {"input": {"paths": ["a.parquet"]}, "engine": {"target": "m"}}


def with_value(path: str, value: Any) -> dict[str, Any]:
    """The minimal spec with one key set, by dotted path."""
    data: dict[str, Any] = {key: dict(section) for key, section in MINIMAL.items()}
    section = data
    *parents, key = path.split(".")
    for parent in parents:
        section = section.setdefault(parent, {})
    section[key] = value
    return data


def test_defaults_are_those_of_the_sections() -> None:
    spec = parse_spec(MINIMAL)
    assert spec.engine == asdict(EngineConfig(target="m"))
    assert spec.sampling["max_tokens"] == 256
    assert spec.seed == 0


def test_every_default_is_written_out_and_read_again() -> None:
    stored = parse_spec(with_value("sampling.logit_bias", {5: -1.0})).to_dict()
    assert parse_spec(stored).to_dict() == stored
    assert stored["sampling"]["logit_bias"] == {"5": -1.0}


def test_sections_become_the_frozen_configs() -> None:
    data = with_value("engine.speculation", {"method": "draft_model", "draft": "d", "tree_width": 2})
    assert parse_spec(data).engine_config() == EngineConfig(
        target="m", speculation=SpeculationConfig(method="draft_model", draft="d", tree_width=2)
    )


def test_workers_read_what_the_runner_writes() -> None:
    spec = parse_spec(with_value("engine.max_batch", 3))
    assert engine_config(spec.to_dict()["engine"]) == spec.engine_config()


def test_one_path_may_be_a_string() -> None:
    assert parse_spec(with_value("input.paths", "b.parquet")).input.paths == ["b.parquet"]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("nmae", "x", "unknown key 'nmae' in the job spec; did you mean 'name'"),
        ("engine.max-batsh", 3, "unknown key 'max-batsh' in engine; did you mean 'max_batch'"),
        ("engine.speculation.max_draft", 3, "in engine.speculation; did you mean 'max_draft_tokens'"),
        ("sampling.topp", 0.9, "unknown key 'topp' in sampling; did you mean 'top_p'"),
        ("input.prompt", "x", "unknown key 'prompt' in input; did you mean 'prompt_column'"),
        ("zzz", 1, "known keys: chat_template"),
        ("engine.max_batch", "8", "engine.max_batch must be int, got '8'"),
        ("engine.max_batch", 0, "engine: max_batch must be at least 1"),
        ("engine.prefix_reuse", 1, "engine.prefix_reuse must be bool"),
        ("engine.target", "", "engine: target must name a model"),
        ("engine.speculation.method", "ngrams", "engine.speculation: method must be one of none, ngram"),
        ("engine.speculation.draft", "d", "draft is set, but method is none"),
        ("sampling.temperature", -1, "sampling: temperature must be >= 0"),
        ("sampling.bad_words", "no", "sampling.bad_words must be a list"),
        ("sampling.bad_words", [""], "sampling.bad_words must be a list of non-empty strings"),
        ("seed", -1, "seed: Input should be greater than or equal to 0"),
        ("max_error_rate", 2, "max_error_rate: Input should be less than or equal to 1"),
        ("chunk_rows", 0, "chunk_rows: Input should be greater than or equal to 1"),
        ("input.paths", [], "input.paths"),
        ("input", "x", "input must be a mapping"),
        ("engine", None, "engine must be a mapping"),
    ],
)
def test_refuses_by_name(path: str, value: Any, message: str) -> None:
    with pytest.raises(SpecError) as error:
        parse_spec(with_value(path, value))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"engine": {"target": "m"}}, "input is missing"),
        ({"input": {"paths": "a"}}, "engine is missing"),
        ({"input": {"paths": "a"}, "engine": {}}, "engine.target is missing"),
        (
            {"input": {"paths": "a", "prompt_column": "p", "messages_column": "m"}, "engine": {"target": "m"}},
            "both prompt_column 'p' and messages_column 'm'",
        ),
    ],
)
def test_what_is_missing_or_contradictory(data: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as error:
        parse_spec(data)
    assert message in str(error.value)
