"""Drafts that are of no use do not end like good ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from runner.output.draft_advice import draft_warning
from storage.records import Counts, Job, JobState
from storage.spec import InputSpec, JobSpec
from tests.support.cli import Cli
from workers.engine.measure.report import BatchReport, recommend

TARGET = "scripted:seed=1,order=2,eos_every=0"


def job(sampling: dict[str, Any] | None = None, **speculation: Any) -> Job:
    spec = JobSpec(InputSpec(("x",)), {"target": "m", "speculation": speculation}, sampling or {})
    return Job("id", "j", JobState.COMPLETED, spec, "", 1, 1, datetime.now(UTC))


@pytest.mark.parametrize(
    ("options", "drafted", "accepted", "cause"),
    [
        ({"method": "draft_model", "draft": "d", "max_draft_tokens": 4}, 4000, 9, "tokenizer"),
        ({"method": "draft_model", "draft": "d", "max_draft_tokens": 4}, 4000, 60, None),
        ({"method": "draft_model", "draft": "d", "max_draft_tokens": 4}, 70, 0, None),
        ({"method": "ngram", "max_draft_tokens": 32}, 32000, 300, None),
        ({"method": "eagle", "draft": "d"}, 16000, 20, "trained for another target"),
        ({"method": "eagle", "draft": "d"}, 16000, 200, None),
        ({"method": "medusa", "draft": "d"}, 16000, 0, "heads"),
        ({"method": "self", "skip": ["mlp.0"]}, 4000, 0, "calibrate"),
        ({"method": "none"}, 0, 0, None),
    ],
)
def test_a_warning_needs_drafts_and_next_to_nothing_accepted(
    options: dict[str, Any], drafted: int, accepted: int, cause: str | None
) -> None:
    counts = Counts(5000, 5000 - accepted, drafted, accepted, num_ok=1)
    found = draft_warning(job(**options), counts)
    assert (found is None) == (cause is None)
    assert cause is None or cause in str(found)
    if found is not None:
        assert "temperature of 1.5" in str(draft_warning(job({"temperature": 1.5}, **options), counts))


def test_run_and_status_say_so(cli: Cli, write_prompts: Callable[..., Path]) -> None:
    prompts = write_prompts([f"prompt {n}" for n in range(8)])
    hopeless = ("--draft", "scripted:seed=99,order=2,eos_every=0", "--policy", "fixed", "--name")
    good = ("--draft", "target", "--policy", "fixed", "--name")
    ran = cli("run", str(prompts), "--target", TARGET, "--max-tokens", "20", *hopeless, "hopeless")
    assert "warning: of " in ran.stderr
    assert "Likely causes" in " ".join(ran.stdout.split())
    assert "tokenizer" in cli.json("status", "hopeless")["draft_warning"]
    assert cli.run(prompts, *good, "good", target=TARGET)["draft_warning"] is None


def test_check_draft_recommends_a_length_or_none(cli: Cli, write_prompts: Callable[..., Path]) -> None:
    prompts = write_prompts([f"prompt {n}" for n in range(8)])
    arguments = (str(prompts), "--target", TARGET, "--batch", "1", "--max-tokens", "20")
    checked = cli("check-draft", *arguments, "--draft", "scripted:seed=99,order=2,eos_every=0")
    assert "recommended draft length: batch 1: none" in checked.stdout
    assert "warning: next to no draft begins" in checked.stderr
    [found] = cli.json("check-draft", *arguments, "--draft", "target")["recommendations"]
    assert found["batch"] == 1


@pytest.mark.parametrize(
    ("survival", "level", "verify", "measured", "length"),
    [
        ((0.9, 0.8, 0.7, 0.6), 0.05, 1.0, 1.0, 4),
        ((0.9, 0.5, 0.05, 0.01), 0.2, 1.1, 1.0, 2),
        ((0.6, 0.1, 0.0, 0.0), 0.2, 1.1, 1.0, 1),
        ((0.1, 0.0, 0.0, 0.0), 0.2, 1.1, 1.0, 0),
        ((0.9, 0.5), 0.2, 1.1, 1.0, 2),
        ((0.9, 0.5, 0.05, 0.01), 0.2, 1.1, 0.6, 0),
    ],
    ids=["all", "two", "one", "none", "never reached", "the clock says no"],
)
def test_the_recommended_length_is_the_fastest(
    survival: tuple[float, ...], level: float, verify: float, measured: float, length: int
) -> None:
    """Against every length tried by hand; `measured` is the share of the predicted speedup that the clock confirmed."""
    tokens = 1 + sum(survival)
    predicted = tokens / (4 * level + verify)
    batch = BatchReport(8, 8, tokens, 9, 9, 1.0, level, verify, 1 / level, predicted, measured * predicted)
    found = recommend(batch, survival, 4)
    assert found.length == length
    assert found.is_longest == (length == 4)
    times = [1.0, *(k * level + 1 + (verify - 1) * k / 4 for k in range(1, 5))]
    rates = [1.0, *(measured * (1 + sum(survival[:k])) / times[k] for k in range(1, 5))]
    assert found.speedup == pytest.approx(rates[length])
    assert max(rates) <= rates[length] * 1.03
    assert recommend(replace(batch, batch=1), survival, 4).batch == 1
