from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

import pytest

from runner.errors import SpecError
from runner.spec.parse import ENGINE_KEYS, INPUT_KEYS, JOB_KEYS, SAMPLING_KEYS, SPECULATION_KEYS, parse_spec
from storage.spec import JobSpec, plain
from tests.support.specs import MINIMAL
from workers.engine.api.config import EngineConfig, SpeculationConfig
from workers.rows.settings import engine_config, with_engine


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
    assert spec.engine == plain(asdict(EngineConfig(target="m")))
    assert spec.sampling["max_tokens"] == 256
    assert spec.seed == 0


def test_every_default_is_written_out_and_read_again() -> None:
    spec = parse_spec(with_value("sampling.logit_bias", {5: -1.0}))
    stored = json.loads(json.dumps(spec.to_json()))
    assert parse_spec(stored) == JobSpec.parse(stored) == spec
    assert spec.to_json() == stored
    assert stored["sampling"]["logit_bias"] == {"5": -1.0}


def test_sections_become_the_frozen_configs() -> None:
    data = with_value("engine.speculation", {"method": "draft_model", "draft": "d", "tree_width": 2})
    assert engine_config(parse_spec(data)) == EngineConfig(
        target="m", speculation=SpeculationConfig(method="draft_model", draft="d", tree_width=2)
    )


def test_workers_read_what_the_runner_writes() -> None:
    spec = parse_spec(with_value("engine.max_batch", 3))
    assert engine_config(JobSpec.parse(spec.to_json())) == EngineConfig("m", max_batch=3)
    assert with_engine(spec, engine_config(spec)) == spec


def test_one_path_may_be_a_string() -> None:
    assert parse_spec(with_value("input.paths", "b.parquet")).input.paths == ("b.parquet",)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("nmae", "x", "unknown key 'nmae' in the job spec; did you mean 'name'"),
        ("engine.max-batsh", 3, "unknown key 'max-batsh' in engine; did you mean 'max_batch'"),
        ("engine.speculation.verfy", "exact", "in engine.speculation; did you mean 'verify'"),
        ("sampling.topp", 0.9, "unknown key 'topp' in sampling; did you mean 'top_p'"),
        ("input.prompt", "x", "unknown key 'prompt' in input; did you mean 'prompt_column'"),
        ("zzz", 1, "known keys: chat_template"),
        ("engine.max_batch", "8", "engine.max_batch must be an integer, got '8'"),
        ("engine.max_batch", 0, "engine.max_batch must be at least 1, got 0"),
        ("engine.prefix_reuse", 1, "engine.prefix_reuse must be true or false, got 1"),
        ("engine.target", "", "engine.target must name a model"),
        ("engine.speculation.method", "ngrams", "engine.speculation.method must be one of none, ngram"),
        ("engine.speculation.draft", "d", "draft is set, but method is none"),
        ("sampling.temperature", -1, "sampling.temperature must be 0 to 100, got -1"),
        ("sampling.bad_words", "no", "sampling.bad_words must be a list"),
        ("sampling.bad_words", [""], "sampling.bad_words must be a list of non-empty strings"),
        ("seed", -1, "seed must be at least 0, got -1"),
        ("max_error_rate", 2, "max_error_rate must be at most 1, got 2"),
        ("chunk_rows", 0, "chunk_rows must be at least 1, got 0"),
        ("input.paths", [], "input.paths"),
        ("input", "x", "input must be a mapping"),
        ("engine", 3, "engine must be a mapping"),
        ("engine", None, "engine.target is missing"),
        ("name", "a/b", "job name 'a/b': use 1 to 100 letters"),
    ],
)
def test_refuses_by_name(path: str, value: Any, message: str) -> None:
    with pytest.raises(SpecError) as error:
        parse_spec(with_value(path, value))
    (problem,) = error.value.problems
    assert message in problem


WRONG: list[Any] = [None, "x", "", 3, -3, 0.5, True, [], [3], ["x"], [[]], [[-1]], {}, {"x": "y"}, 10**400, -math.inf]
WRONG += [math.nan, "\ud800"]
PLACES = [
    *((name,) for name in JOB_KEYS),
    *(("input", key) for key in INPUT_KEYS),
    *(("engine", key) for key in ENGINE_KEYS),
    *(("engine", "speculation", key) for key in SPECULATION_KEYS),
    *(("sampling", key) for key in SAMPLING_KEYS),
]


@pytest.mark.parametrize("place", PLACES, ids=".".join)
def test_every_key_has_values_that_are_refused_in_words_of_our_own(place: tuple[str, ...]) -> None:
    refused = 0
    for value in WRONG:
        try:
            parse_spec(with_value(".".join(place), value))
        except SpecError as error:
            refused += 1
            for problem in error.problems:
                assert place[-1] in problem, problem
                assert "\n" not in problem
                assert "Input should" not in problem
                assert "<=" not in problem or "> 0 and <= 1" in problem, problem
    assert refused >= 4


MISTAKES: dict[str, Any] = {
    "nmae": "x",
    "seed": "7",
    "max_attempts": 0,
    "input": {"paths": ["a.parquet"], "limit": -1, "colum": "c", "prompt_column": 3},
    "engine": {
        "taget": "m",
        "max_batch": "8",
        "block_size": 12,
        "speculation": {
            "method": "draft_model",
            "darft": "d",
            "max_draft_tokens": 99,
            "tree_width": 0,
            "exit_layer": 3,
        },
    },
    "sampling": {"temprature": 1, "top_p": 3, "max_tokens": "many", "n": 0, "stop": [""], "bad_words": 3},
}
NAMED = (
    *("unknown key 'nmae' in the job spec", "seed must be an integer", "max_attempts must be at least 1"),
    *("input.limit must be at least 0", "unknown key 'colum' in input", "input.prompt_column must be text"),
    *("unknown key 'taget' in engine", "engine.max_batch must be an integer", "engine.block_size must be a power of"),
    *("unknown key 'darft'", "engine.speculation.max_draft_tokens must be 1 to 32", "engine.speculation.tree_width"),
    *("engine.speculation.exit_layer is set", "unknown key 'temprature' in sampling", "sampling.top_p must be > 0"),
    *("sampling.max_tokens must be an", "sampling.n must be 1", "sampling.stop holds an", "sampling.bad_words must be"),
)


def test_every_mistake_is_named_once_and_nothing_that_follows_from_another() -> None:
    with pytest.raises(SpecError) as error:
        parse_spec(MISTAKES)
    problems = list(error.value.problems)
    for words in NAMED:
        (found,) = [problem for problem in problems if words in problem]
        problems.remove(found)
    assert problems == []
    assert len(str(error.value).splitlines()) == 1 + len(NAMED)


@pytest.mark.parametrize(
    "section",
    [
        {"method": "ngrams", "draft": "d"},
        {"method": "draft_model", "drft": "d"},
        {"metod": "draft_model", "draft": "d"},
        {"tree_width": 99},
        {"verify": "blok", "method": "ngram"},
    ],
)
def test_what_a_mistake_leaves_contradictory_is_no_second_one(section: dict[str, Any]) -> None:
    with pytest.raises(SpecError) as error:
        parse_spec(with_value("engine.speculation", section))
    assert len(error.value.problems) == 1


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"engine": {"target": "m"}}, "input.paths is missing"),
        ({"input": {"paths": "a"}}, "engine.target is missing"),
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
