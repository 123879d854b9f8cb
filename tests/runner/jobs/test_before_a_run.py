"""What a dry run shows, and what is refused before anything is recorded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cli import TARGET, Cli

WritePrompts = Callable[..., Path]


@pytest.fixture
def prompts(write_prompts: WritePrompts) -> Path:
    return write_prompts([f"prompt {n}" for n in range(20)], category=["a", "b"] * 10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt-column", "promt"], "did you mean 'prompt'"),
        (["--target", "no/such/model.gguf"], "no such directory or file"),
        (["--target", "scripted:vocap=300"], "unknown option 'vocap'"),
        (["--target", "scripted:vocab=3"], "vocab must be at least 257"),
    ],
)
def test_what_cannot_work_is_named(cli: Cli, prompts: Path, arguments: list[str], message: str) -> None:
    result = cli("run", str(prompts), "--target", TARGET, *arguments, code=2)
    assert message in result.output


def test_input_that_is_missing_or_not_parquet_is_named(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 cut off")
    for name in ("missing.parquet", "broken.parquet"):
        assert name in cli("run", name, "--target", TARGET, code=2).output


def test_dry_run_shows_prompts_histogram_and_plan_and_records_nothing(cli: Cli, write_prompts: WritePrompts) -> None:
    path = write_prompts(["x" * 5, None, "y" * 300, "z"])
    plan = cli.json("run", str(path), "--target", TARGET, "--dry-run", "--limit", "4")
    assert plan["plan"]["rows"] == 4
    assert plan["num_sampled"] == 4
    assert sum(plan["histogram"].values()) == 3
    assert [row["error_code"] for row in plan["rejected"]] == ["null_prompt"]
    assert "xxxxx" in plan["prompts"][0]["text"]
    shown = cli("run", str(path), "--target", TARGET, "--dry-run").stdout
    assert "prompt tokens of 4 sampled rows" in shown
    assert not (cli.folder / "jobs.db").exists()


def test_a_dry_run_rejects_the_rows_that_the_run_rejects(cli: Cli, write_prompts: WritePrompts) -> None:
    params = [None, None, None, '{"stop_token_ids": [900]}', '{"max_tokens": 90}', '{"top_k": -3}', None]
    prompts = ["x", "y" * 300, None, "z", "z", "z", "z"]
    path = write_prompts(prompts, sampling_params=params, speculation=[None] * 6 + ["none"])
    arguments = ("run", str(path), "--target", "scripted:max_len=128", "--max-tokens", "8", "--name", "rows")
    small = ("--set", "engine.kv_blocks=5", "--method", "ngram")
    plan = cli.json(*arguments, *small, "--dry-run")
    assert plan["plan"]["context, tokens"] == 128
    cli(*arguments, *small, code=3)
    query = "SELECT row_index, error_code, error_message FROM results WHERE error_code IS NOT NULL ORDER BY row_index"
    recorded = cli.json("sql", query)
    assert [row["row_index"] for row in recorded] == [1, 2, 3, 4, 5]
    assert plan["rejected"] == recorded


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("kv_blocks=1", "kv_blocks must be at least 2"),
        ("kv_blocks=2", "no row of this job can run"),
        ("kv_memory=64", "too small"),
    ],
)
def test_a_pool_in_which_no_row_fits_is_refused_before_anything_is_recorded(
    cli: Cli, prompts: Path, option: str, message: str
) -> None:
    refused = cli(
        "run", str(prompts), "--target", TARGET, "--max-tokens", "40", "--set", f"engine.{option}", code=2
    )  # fmt: skip
    assert message in refused.stderr, refused.stderr


def test_the_plan_names_the_methods_and_their_options(cli: Cli, prompts: Path) -> None:
    arguments = ("run", str(prompts), "--target", TARGET, "--dry-run")
    plan = cli.json(*arguments, "--draft", "target", "--row-method", "ngram", "--row-method", "none")["plan"]
    assert (plan["method"], plan["row methods"], plan["draft"]) == ("draft_model", ["ngram", "none"], "target")
    assert (plan["max draft tokens"], plan["ngram max"], plan["verify"]) == (4, 5, "exact")
    plain = cli.json(*arguments)["plan"]
    assert plain["method"] == "none"
    assert not {"row methods", "draft", "verify", "max draft tokens"} & plain.keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--method", "self"), "does not know which sublayers"),
        (("--method", "self", "--skip-file", "nowhere.json"), "No such file"),
        (
            ("--method", "none", "--row-method", "self", "--set", "engine.speculation.exit_layer=9"),
            "exit_layer must be",
        ),
        (("--method", "eagle", "--draft", "./nowhere"), "no such directory"),
        (("--method", "medusa", "--draft", "./nowhere"), "no such directory"),
        (("--method", "draft_model", "--draft", "./nowhere"), "no such directory"),
        (("--draft", "scripted:vocab=300", "--vocabulary", "same"), "have different vocabularies"),
    ],
)
def test_a_draft_that_cannot_work_is_named_before_a_job_is_stored(
    cli: Cli, prompts: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    monkeypatch.setenv("NIGHTDRAFT_CACHE", str(cli.folder / "cache"))
    for dry in ((), ("--dry-run",)):
        result = cli("run", str(prompts), "--target", "scripted:layers=4", *arguments, *dry, code=2)
        assert message in result.output.replace("\n", " ")
    assert cli.json("status") == []


def test_a_job_for_other_machines_is_stored_whatever_models_are_here(cli: Cli, prompts: Path) -> None:
    section = "{target: ./no-such-target, speculation: {method: eagle, draft: ./no-such-draft}}"
    (cli.folder / "job.yaml").write_text(f"input: {{paths: {prompts.name}}}\nengine: {section}\n")
    cli("submit", "job.yaml")
    assert len(cli.json("status")) == 1


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("prompts.parquet", "is an input file of the job"),
        ("/proc/x", "cannot write in /proc/x"),
        ("/proc/x.parquet", "cannot write in /proc"),
        ("afile/x.parquet", "cannot write in afile"),
        ("", "--out is empty"),
        ("s3://bucket/x.parquet", "a local file"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_before_the_run(
    cli: Cli, prompts: Path, out: str, message: str
) -> None:
    (cli.folder / "afile").touch()
    refused = cli("run", str(prompts), "--target", TARGET, "--out", out, code=2)
    assert message in refused.output
    assert not (cli.folder / "jobs.db").exists()


@pytest.mark.parametrize("out", ["", "/proc/x/y.csv", "afile/y.csv", "."])
def test_export_and_sql_refuse_such_an_output_as_well(cli: Cli, prompts: Path, out: str) -> None:
    (cli.folder / "afile").touch()
    cli.run(prompts, "--name", "j")
    for arguments in (("export", "j"), ("sql", "SELECT 1", "--format", "csv")):
        assert "error: --out" in cli(*arguments, "--out", out, code=2).output
    cli("sql", "SELECT 1", "--format", "csv", "--out", "new/y.csv")
    assert (cli.folder / "new/y.csv").read_text().splitlines() == ["1", "1"]
