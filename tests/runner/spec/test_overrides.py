from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from runner.errors import SpecError, UsageError
from runner.spec.job_file import load_yaml
from runner.spec.overrides import build_spec

JOB = """
name: from-file
input: {paths: [data/a.parquet], prompt_column: prompt}
engine:
  target: m
  max_batch: 8
  speculation: {method: draft_model, draft: d, tree_width: 2, max_draft_tokens: 3}
sampling: {max_tokens: 11, temperature: 0.5}
"""


def flags(target: str | None = None, **speculation: Any) -> dict[str, Any]:
    return {"name": None, "engine": {"target": target, "speculation": speculation}, "sampling": {"temperature": None}}


@pytest.fixture
def job_file(tmp_path: Path) -> str:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return str(path)


def test_flags_lie_over_the_job_file(job_file: str) -> None:
    spec = build_spec([job_file], {**flags(), "sampling": {"temperature": 0.9}}, ["engine.max_batch=4"])
    assert (spec.sampling["temperature"], spec.sampling["max_tokens"], spec.engine["max_batch"]) == (0.9, 11, 4)
    assert spec.name == "from-file"


def test_paths_in_a_job_file_count_from_its_directory(job_file: str, tmp_path: Path) -> None:
    assert build_spec([job_file], flags()).input.paths == (str(tmp_path / "data/a.parquet"),)


def test_input_paths_become_absolute_and_urls_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    spec = build_spec(["x/*.parquet", "s3://bucket/y"], flags("m"))
    assert spec.input.paths == (str(tmp_path / "x/*.parquet"), "s3://bucket/y")


def test_a_model_directory_becomes_absolute_and_a_hub_id_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models/m").mkdir(parents=True)
    assert build_spec(["x"], flags("models/m")).engine["target"] == str(tmp_path / "models/m")
    assert build_spec(["x"], flags("org/m")).engine["target"] == "org/m"


def test_draft_implies_draft_model() -> None:
    assert build_spec(["x"], flags("m", draft="d", method=None)).engine["speculation"]["method"] == "draft_model"


def test_another_method_drops_the_draft_of_the_job_file(job_file: str) -> None:
    speculation = build_spec([job_file], flags(method="ngram")).engine["speculation"]
    assert (speculation["method"], speculation["draft"], speculation["tree_width"]) == ("ngram", None, None)
    assert speculation["max_draft_tokens"] == 3


def test_a_method_that_rows_may_ask_for_keeps_its_options(job_file: str) -> None:
    speculation = build_spec([job_file], flags(method="ngram", row_methods=["draft_model"])).engine["speculation"]
    assert (speculation["method"], speculation["draft"], speculation["tree_width"]) == ("ngram", "d", 2)
    speculation = build_spec(["x"], flags("m", draft="d", row_methods=["draft_model"])).engine["speculation"]
    assert (speculation["method"], speculation["row_methods"]) == ("none", ["draft_model"])


def test_settings_are_yaml_values() -> None:
    spec = build_spec(["x"], flags("m"), ['sampling.stop=["\\n", end]', "keep_token_ids=true"])
    assert spec.sampling["stop"] == ["\n", "end"]
    assert spec.keep_token_ids


@pytest.mark.parametrize(
    ("inputs", "settings", "message"),
    [
        (["x"], ["sampling.topk=3"], "did you mean 'top_k'"),
        (["x"], ["engine.speculation.row_methods=3"], "row_methods must be a list of texts, got 3"),
        (["x"], ["top_k"], "--set takes KEY=VALUE"),
        (["x"], ["sampling.stop=[a"], "is not a YAML value"),
        (["x"], ["engine=3"], "engine must be a mapping of keys to values, got 3"),
        (["a.yaml", "x"], [], "a.yaml is a job file"),
        (["missing.yaml"], [], "cannot read the job file missing.yaml"),
    ],
)
def test_refuses_by_name(inputs: list[str], settings: list[str], message: str) -> None:
    with pytest.raises(UsageError) as error:
        build_spec(inputs, flags("m"), settings)
    assert message in str(error.value)


def test_a_target_is_needed() -> None:
    with pytest.raises(UsageError, match="add --target MODEL"):
        build_spec(["x"], flags())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("engien: {target: m}", "unknown key 'engien' in the job spec; did you mean 'engine'"),
        ("engine: {taget: m}", "unknown key 'taget' in engine; did you mean 'target'"),
        ("engine: {max_batch: 2}", "set engine.target in "),
    ],
)
def test_a_typo_is_named_ahead_of_what_it_leaves_missing(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "j.yaml").write_text(f"input: {{paths: x}}\n{text}\n")
    with pytest.raises(UsageError) as error:
        build_spec([str(tmp_path / "j.yaml")], flags())
    assert message in str(error.value)
    assert "--target" not in str(error.value)


@pytest.mark.parametrize(("name", "text"), [("j.yaml", "a: [1"), ("j.json", "{"), ("j.yaml", "3")])
def test_a_broken_job_file_is_named(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(SpecError, match=name):
        build_spec([str(tmp_path / name)], flags("m"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("j.yaml", "engine:\n  max_batch: 2\n  max_batch: 3\nseed: 1\nseed: 2\n"),
        ("j.json", '{"engine": {"max_batch": 2, "max_batch": 3}, "seed": 1, "seed": 2}'),
    ],
)
def test_every_key_that_is_there_twice_is_refused_by_name(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(SpecError) as error:
        build_spec([str(tmp_path / name)], flags("m"))
    for key, problem in zip(("max_batch", "seed"), error.value.problems, strict=True):
        assert f"{name}: key '{key}' is there twice" in problem
    with pytest.raises(SpecError, match="--set sampling: key 'n' is there twice"):
        build_spec(["x"], flags("m"), ["sampling={n: 1, n: 2}"])


def test_a_merged_mapping_may_be_overridden() -> None:
    assert load_yaml("a: &a {x: 1, y: 1}\nb: {<<: *a, x: 2}\nc: *a")["b"] == {"x": 2, "y": 1}


@pytest.mark.parametrize("given", ["ngram", "[ngram]"])
def test_one_row_method_is_a_list_of_one(tmp_path: Path, given: str) -> None:
    (tmp_path / "j.yaml").write_text(
        f"input: {{paths: x}}\nengine: {{target: m, speculation: {{row_methods: {given}}}}}\n"
    )
    for spec in (
        build_spec([str(tmp_path / "j.yaml")], flags()),
        build_spec(["x"], flags("m"), [f"engine.speculation.row_methods={given}"]),
    ):
        assert spec.engine["speculation"]["row_methods"] == ["ngram"]


def test_the_same_command_gets_the_same_name_and_another_spec_another() -> None:
    name = build_spec(["x/prompts.parquet"], flags("org/My-Model")).name
    assert name is not None
    assert name.startswith("prompts-my-model-")
    assert build_spec(["x/prompts.parquet"], flags("org/My-Model")).name == name
    assert build_spec(["x/prompts.parquet"], flags("org/My-Model"), ["seed=1"]).name != name
