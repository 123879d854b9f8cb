"""`check-draft` and `calibrate`: rows come in as jobs read them, reports go out as tables and as JSON."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cli import Cli
from tests.support.drafts.weights import random_heads, write_heads
from tests.support.models.tiny import config_of, save

WritePrompts = Callable[..., Path]
TARGET = "scripted:seed=3,order=2,eos_every=0,sharpness=2.0"
SMALL = ("--limit", "3", "--max-tokens", "24", "--batch", "2")


@pytest.fixture
def prompts(write_prompts: WritePrompts) -> Path:
    return write_prompts(["one two three", "four", "five, six", None, "seven"])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("llama"), config_of("Llama"))


def test_check_draft_reports_what_makes_a_good_draft(cli: Cli, prompts: Path) -> None:
    arguments = ("check-draft", str(prompts), "--target", TARGET, "--draft", "target", *SMALL, "--batch", "1")
    report = cli.json(*arguments)
    assert report["identical"]
    assert report["method"] == "draft_model"
    assert report["acceptance"] == [1.0] * 4
    assert [batch["batch"] for batch in report["batches"]] == [2, 1]
    assert "speed" in report["failed_rules"]
    assert (report["prompts"], report["output_tokens"]) == (3, 3 * 24)
    assert report["output_tokens"] == report["steps"] + sum(report["accepted"])
    assert [len(interval) for interval in report["intervals"]] == [2] * 4
    assert report["draft_hidden_bytes_per_token"] == 0
    result = cli(*arguments)
    measured = f"3 prompts, 72 output tokens, {report['steps']} steps, of which {report['tested']} tested a draft"
    words = ("same tokens as plain decoding", "size ratio", "acceptance by position", "95 % interval", "by batch size")
    for expected in (measured, "hidden states per token", "rules of thumb that fail: speed", *words):
        assert expected in result.stdout
    assert "repeated" not in result.stderr


def test_check_draft_says_what_too_few_prompts_leave_open(cli: Cli, prompts: Path) -> None:
    arguments = ("check-draft", str(prompts), "--target", TARGET, "--draft", "target", "--max-tokens", "8")
    result = cli(*arguments, "--limit", "2", "--batch", "2", "--batch", "5")
    assert "undecided, give more rows or tokens: acceptance" in result.stdout
    assert "every rule of thumb holds" not in result.stdout
    assert "measured on 2 prompts only" in result.stderr
    notes = [line for line in result.stderr.splitlines() if "repeated to time it, and counted once" in line]
    assert len(notes) == 1
    assert notes[0].startswith("batch 5 holds more sequences than there are prompts (2)")
    found = cli.json(*arguments, "--limit", "2", "--batch", "5")
    assert (found["undecided_rules"], found["prompts"]) == (["acceptance"], 2)


def test_rows_that_cannot_run_are_left_out_with_a_note(cli: Cli, prompts: Path, write_prompts: WritePrompts) -> None:
    arguments = ("--target", TARGET, "--method", "ngram", "--max-tokens", "24", "--batch", "1", "--limit", "5")
    result = cli("check-draft", str(prompts), *arguments)
    assert "1 of 5 rows are left out" in result.stderr
    assert "null_prompt" in result.stderr
    assert "measured on 4 prompts only" in result.stderr
    empty = write_prompts([None, None], "empty.parquet")
    assert "none of the 2 rows" in cli("check-draft", str(empty), *arguments, code=2).stderr


def test_a_prompt_longer_than_the_models_context_is_left_out(cli: Cli, write_prompts: WritePrompts, llama: str) -> None:
    path = write_prompts(["one two three", "word " * 500])
    result = cli("check-draft", str(path), "--target", llama, "--method", "ngram", "--max-tokens", "24", "--batch", "1")
    assert "1 of 2 rows are left out" in result.stderr
    assert "prompt_too_long" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check-draft", "--target", TARGET], "no way of drafting is named"),
        (["check-draft", "--target", TARGET, "--method", "ngramm"], "method must be one of"),
        (["calibrate", "--target", TARGET, "--method", "ngram"], "nothing to calibrate; these have: medusa, self"),
        (["calibrate", "--target", TARGET, "--method", "medusa"], "needs a draft"),
        (
            ["calibrate", "--target", TARGET, "--method", "medusa", "--draft", "x", "--out", "y"],
            "--out is for method self",
        ),
        (["calibrate", "--method", "self"], "add --target"),
        (["calibrate", "--target", TARGET, "--method", "self", "--out", "."], "is a directory"),
        (["calibrate", "--target", TARGET, "--method", "self", "--out", "/proc/x.json"], "cannot write in /proc"),
    ],
)
def test_what_cannot_work_is_named(cli: Cli, prompts: Path, arguments: list[str], message: str) -> None:
    assert message in cli(arguments[0], str(prompts), *arguments[1:], code=2).stderr


def test_a_skip_set_is_calibrated_and_a_job_takes_it(cli: Cli, prompts: Path, llama: str) -> None:
    found = cli.json("calibrate", str(prompts), "--target", llama, "--method", "self", *SMALL, "--out", "skip.json")
    assert found["file"] == "skip.json"
    assert all(name.split(".")[0] in ("attn", "mlp") for name in found["skip"])
    arguments = ("--method", "self", "--skip-file", "skip.json", "--policy", "fixed", "--max-tokens", "8")
    summary = cli.json("run", str(prompts), "--target", llama, *arguments, "--limit", "3")
    assert (summary["num_ok"], summary["num_draft_tokens"] > 0) == (3, True)


def test_a_medusa_tree_is_calibrated_and_kept_beside_the_heads(
    cli: Cli, prompts: Path, llama: str, tmp_path: Path
) -> None:
    heads = write_heads(tmp_path / "heads", random_heads())
    arguments = ("calibrate", str(prompts), "--target", llama, "--method", "medusa", "--draft", heads, *SMALL)
    found = cli.json(*arguments)
    assert (tmp_path / "heads" / found["file"]).is_file()
    assert found["nodes"] == len(found["paths"]) >= 1
    assert found["expected_tokens"] > 1
    assert "calibrated medusa" in cli(*arguments).stdout
