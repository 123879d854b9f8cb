"""A job whose rows name their speculation method: one batch, the same answers, statistics apart."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from runner.jobs.local import LocalRun
from runner.jobs.submit import submit_job
from runner.output.progress import JsonDisplay
from runner.spec.parse import parse_spec
from storage.records import Job, JobState
from storage.store.query import run_sql
from storage.store.store import Store
from tests.support.cli import TARGET, Cli

WritePrompts = Callable[..., Path]
METHODS = ["none", "ngram", "suffix", "draft_model", None]
NUM_ROWS = 40


@pytest.fixture
def prompts(write_prompts: WritePrompts) -> Path:
    return write_prompts([f"prompt {n}" for n in range(NUM_ROWS)], speculation=METHODS * (NUM_ROWS // len(METHODS)))


def run(store: Store, path: Path, name: str, **speculation: Any) -> Job:
    engine = {"target": "scripted:order=1,eos_every=0", "max_batch": 16, "speculation": speculation}
    section = {"paths": str(path), "prompt_column": "prompt"}
    sampling = {"max_tokens": 40, "temperature": 0.3}
    spec = parse_spec({"name": name, "input": section, "engine": engine, "sampling": sampling, "chunk_rows": 16})
    outcome = LocalRun(store, submit_job(store, spec).job, threading.Event()).run(JsonDisplay())
    assert outcome.job.state is JobState.COMPLETED
    return outcome.job


def rows_of(store: Store, query: str) -> list[Sequence[Any]]:
    return list(run_sql(store, query)[1])


def test_rows_name_their_method_and_the_view_separates_them(store: Store, prompts: Path) -> None:
    job = run(
        store,
        prompts,
        "mixed",
        method="ngram",
        row_methods=["none", "suffix", "draft_model"],
        draft="target",
        policy="fixed",
    )
    found = rows_of(
        store,
        "SELECT method, num_results, num_draft_tokens, num_accepted_draft_tokens, num_output_tokens"
        " FROM acceptance_by_speculator WHERE job_name = 'mixed'",
    )
    drafted = {method: (results, drafts, accepted) for method, results, drafts, accepted, _ in found}
    assert {method: results for method, (results, _, _) in drafted.items()} == {
        "none": 8,
        "ngram": 16,
        "suffix": 8,
        "draft_model": 8,
    }
    assert drafted["none"][1:] == (0, 0)
    assert all(drafted[method][2] > 0 for method in ("ngram", "suffix", "draft_model"))
    assert drafted["draft_model"][2] / drafted["draft_model"][1] > drafted["ngram"][2] / drafted["ngram"][1]
    assert sum(row[4] for row in found) == 40 * NUM_ROWS
    assert {row["method"] for row in store.telemetry.speculators(job.id)} == set(drafted)


def test_the_answers_are_those_of_plain_decoding(store: Store, prompts: Path, write_prompts: WritePrompts) -> None:
    mixed = run(store, prompts, "mixed", method="ngram", row_methods=METHODS[:4], draft="target")
    without = write_prompts([f"prompt {n}" for n in range(NUM_ROWS)], "plain.parquet")
    plain = run(store, without, "plain", method="none")
    texts, expected = (
        {result.row_index: result.output_text for result in store.results.iterate(job.id)} for job in (mixed, plain)
    )
    assert texts == expected


def test_unknown_methods_are_those_rows_errors(cli: Cli, write_prompts: WritePrompts) -> None:
    path = write_prompts(["a", "b", "c"], speculation=["ngrm", "suffix", None])
    summary = cli.run(
        path, "--method", "ngram", "--row-method", "suffix", "--row-method", "none", "--name", "m", code=3
    )
    assert (summary["num_ok"], summary["num_errors"]) == (2, 1)
    assert "'ngrm'" in cli.json("status", "m")["notes"][0]
    (error,) = cli.json("errors", "m")
    assert error["error_code"] == "invalid_params"
    assert "did you mean 'ngram'" in error["error_message"]


def test_a_lossy_rule_is_warned_about_and_stands_in_every_rows_method(cli: Cli, write_prompts: WritePrompts) -> None:
    path = write_prompts(["a", "b"])
    arguments = ("run", str(path), "--target", TARGET, "--method", "ngram", "--verify", "typical", "--max-tokens", "8")
    assert "verify typical is lossy" in cli(*arguments, "--name", "lossy").stderr
    assert cli.json("sql", "SELECT DISTINCT method FROM results") == [{"method": "ngram/typical"}]
    assert "lossy" not in cli(*arguments[:6], "--max-tokens", "8").stderr
