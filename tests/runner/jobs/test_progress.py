from __future__ import annotations

import io
import json
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from rich.console import Console

from runner.output.progress import Follower, JsonDisplay, LiveDisplay, PlainDisplay, figures
from runner.output.rates import Rates
from runner.output.summary import JobSummary, summarise
from storage.records import ChunkState, Counts, Job, JobProgress, JobState
from storage.spec import InputSpec, JobSpec

START = datetime(2025, 1, 1, tzinfo=UTC)
SPEC = JobSpec(InputSpec(("x",)), {"target": "m"}, {})
JOB = Job("id", "night", JobState.IN_PROGRESS, SPEC, "hash", 10, 1, START, started_at=START)
COUNTS = Counts(60, 40, 50, 20, num_ok=4, num_errors=1)
PROGRESS = JobProgress(10, {ChunkState.DONE: 1, ChunkState.PENDING: 2, ChunkState.CANCELLED: 0}, COUNTS)
NO_ERRORS = replace(COUNTS, num_errors=0)


def summary(**changes: object) -> JobSummary:
    return replace(summarise(JOB, PROGRESS, now=START), **changes)  # type: ignore[arg-type]


def test_a_summary_derives_rates_and_leaves_out_empty_states() -> None:
    found = summary()
    assert found.num_done == 5
    assert found.mean_acceptance_length == pytest.approx(1.5)
    assert found.draft_acceptance_rate == pytest.approx(0.4)
    assert found.chunks == {"done": 1, "pending": 2}


def test_rates_are_none_where_nothing_was_drafted() -> None:
    found = summarise(JOB, JobProgress(10, {}))
    assert found.mean_acceptance_length is None
    assert found.draft_acceptance_rate is None


def test_figures_say_what_is_known_only() -> None:
    assert figures(summary(mean_acceptance_length=None, counts=NO_ERRORS), Rates()) == ""
    text = figures(summary(), Rates(2.0, 30.4, 65.0))
    assert text == "2.00 rows/s · 30 tokens/s · accepts 1.500 · 1 failed · ETA 1:05"
    assert "ETA" not in figures(summary(state=JobState.COMPLETED), Rates(eta_seconds=0.0))


def test_a_note_stands_in_the_place_of_the_eta() -> None:
    nothing_yet = summary(mean_acceptance_length=None, counts=NO_ERRORS)
    assert figures(nothing_yet, Rates(), "loading the model") == "loading the model"
    assert figures(nothing_yet, Rates(2.0, 30.4, 65.0), "draining") == "2.00 rows/s · 30 tokens/s · draining"
    out = io.StringIO()
    with PlainDisplay(Console(file=out, width=200)) as display:
        display.update(nothing_yet, Rates(), "loading the model")
        display.update(nothing_yet, Rates())
    assert out.getvalue() == "night in_progress 4/10 loading the model\nnight in_progress 4/10\n"


def test_plain_lines_come_on_change_and_now_and_then() -> None:
    out, now = io.StringIO(), [0.0]
    display = PlainDisplay(Console(file=out, width=200), every=10.0, clock=lambda: now[0])
    with display:
        for second in range(12):
            now[0] = float(second)
            display.update(summary(), Rates())
        display.update(summary(state=JobState.COMPLETED), Rates())
    lines = out.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["in_progress", "in_progress", "completed"]


def test_the_last_line_has_the_last_counts() -> None:
    """A job that failed goes on counting while its chunks record what they had finished."""
    out = io.StringIO()
    with PlainDisplay(Console(file=out, width=200), clock=lambda: 0.0) as display:
        for done in (0, 3, 9):
            display.update(summary(state=JobState.FAILED, counts=replace(COUNTS, num_ok=done)), Rates())
    assert [line.split()[2] for line in out.getvalue().splitlines()] == ["1/10", "10/10"]


def test_json_lines_come_on_change(capsys: pytest.CaptureFixture[str]) -> None:
    with JsonDisplay() as display:
        display.update(summary(), Rates())
        display.update(summary(seconds=99.0), Rates())
        display.update(summary(counts=replace(COUNTS, num_ok=9)), Rates(1.0, 2.0, 3.0))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["num_ok"] for line in lines] == [4, 9]
    assert lines[1]["eta_seconds"] == 3.0


def test_the_live_display_draws_on_a_terminal() -> None:
    out = io.StringIO()
    with LiveDisplay(Console(file=out, force_terminal=True, width=120)) as display:
        display.update(summary(), Rates(2.0, 30.0, 65.0))
        display.update(summary(), Rates(), "loading the model")
    assert "night in_progress" in out.getvalue()
    assert "loading the model" in out.getvalue()


def test_a_follower_reads_and_shows(capsys: pytest.CaptureFixture[str]) -> None:
    with JsonDisplay() as display:
        found, pause = Follower(summary, display, poll=0.3).refresh()
    assert found.name == "night"
    assert pause >= 0.3
    assert json.loads(capsys.readouterr().out)["name"] == "night"
