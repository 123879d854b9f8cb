"""The views against the same sums made in Python, and the two databases against each other."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from storage.records import Acceptance, Job, Result, TokenCounts
from storage.sql import views
from storage.store.query import run_sql
from storage.store.store import Store
from storage.store.telemetry import EngineSample
from tests.support.records import add_job, answer, claim, failure, pairs, work

COUNTS = (
    "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens", "num_trimmed_draft_tokens", "num_output_tokens",
)  # fmt: skip


@pytest.fixture
def job(store: Store) -> Job:
    """A job with two methods, two temperatures, several categories and an error."""
    job = add_job(store, num_rows=20)
    work(store, job, bad_rows=(4, 9))
    return job


def query(store: Store, sql: str) -> list[dict[str, Any]]:
    columns, rows = run_sql(store, sql)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def expected(results: Iterable[Result], key: Callable[[Result], Any]) -> dict[Any, dict[str, Any]]:
    groups: dict[Any, list[Acceptance]] = defaultdict(list)
    for result in results:
        if result.acceptance is not None:
            groups[key(result)].append(result.acceptance)
    return {name: _summed(group) for name, group in groups.items()}


def _summed(group: list[Acceptance]) -> dict[str, Any]:
    sums = {name: sum(getattr(a, name) for a in group) for name in COUNTS}
    steps, drafted, accepted = (sums[name] for name in COUNTS[:3])
    return sums | {
        "num_results": len(group),
        "mean_acceptance_length": (accepted + steps) / steps,
        "draft_acceptance_rate": accepted / drafted if drafted else None,
    }


@pytest.mark.parametrize(
    ("view", "column"), [("acceptance_by_speculator", "method"), ("acceptance_by_temperature", "temperature")]
)
def test_acceptance_by_what_the_row_ran_with(store: Store, job: Job, view: str, column: str) -> None:
    found = {row.pop(column): row for row in query(store, f"SELECT * FROM {view}")}
    wanted = expected(store.results.iterate(job.id), lambda r: getattr(r, column))
    assert found == {key: {"job_id": job.id, "job_name": job.name} | sums for key, sums in wanted.items()}


def test_acceptance_by_job_is_the_sum_of_its_rows(store: Store, job: Job) -> None:
    add_job(store, "empty")
    found = {row["job_id"]: row for row in query(store, "SELECT * FROM acceptance_by_job")}
    [wanted] = expected(store.results.iterate(job.id), lambda r: 0).values()
    assert found[job.id] == {"job_id": job.id, "job_name": job.name} | wanted
    progress = store.jobs.progress(job.id)
    assert found[job.id]["num_output_tokens"] == progress.counts.num_output_tokens
    assert found[job.id]["num_draft_tokens"] == progress.counts.num_draft_tokens
    empty = found["id-empty"]
    assert (empty["num_results"], empty["num_draft_tokens"]) == (0, 0)
    assert (empty["mean_acceptance_length"], empty["draft_acceptance_rate"]) == (None, None)


def test_rates_are_null_where_nothing_was_drafted(store: Store) -> None:
    job = add_job(store, num_rows=1)
    chunk = claim(store, job)
    plain = Acceptance(4, 4, 0, 0, 0, (4,))
    store.results.write(chunk.lease, [answer(0, acceptance=plain, num_output_tokens=4)])
    for view in views.NAMES:
        if view.startswith("acceptance_by_") and view not in ("acceptance_by_position", "acceptance_by_length"):
            for row in query(store, f"SELECT * FROM {view}"):
                assert row["draft_acceptance_rate"] is None, view
                assert row["mean_acceptance_length"] == 1.0, view
    assert query(store, "SELECT * FROM acceptance_by_position") == []


@pytest.mark.parametrize("method", ["ngram", "none"])
def test_acceptance_by_position(store: Store, job: Job, method: str) -> None:
    """Of each method by itself: the steps of rows that another method ran say nothing about its drafts."""
    stats = [r.acceptance for r in store.results.iterate(job.id) if r.acceptance and r.method == method]
    steps = sum(a.num_spec_steps for a in stats)
    found = query(store, f"SELECT * FROM acceptance_by_position WHERE method = '{method}' ORDER BY position")
    assert [row["position"] for row in found] == list(range(1, 1 + max(len(a.reached_per_position) for a in stats)))
    for row in found:
        reached, accepted = (
            sum(counts[row["position"] - 1] for counts in arrays if len(counts) >= row["position"])
            for arrays in ([a.reached_per_position for a in stats], [a.accepted_per_position for a in stats])
        )
        assert (row["num_reached"], row["num_accepted"], row["num_spec_steps"]) == (reached, accepted, steps)
        assert row["draft_acceptance_rate"] == accepted / reached
        assert row["survival_rate"] == accepted / steps
    assert sum(row["num_accepted"] for row in found) == sum(a.num_accepted_draft_tokens for a in stats)


@pytest.mark.parametrize("method", ["ngram", "none"])
def test_acceptance_by_length_is_the_histogram(store: Store, job: Job, method: str) -> None:
    found = query(store, f"SELECT * FROM acceptance_by_length WHERE method = '{method}' ORDER BY accepted_length")
    stats = [r.acceptance for r in store.results.iterate(job.id) if r.acceptance and r.method == method]
    assert sum(row["num_spec_steps"] for row in found) == sum(a.num_spec_steps for a in stats)
    assert sum(row["num_spec_steps"] * row["accepted_length"] for row in found) == sum(
        a.num_accepted_draft_tokens for a in stats
    )
    assert sum(row["share_of_steps"] for row in found) == pytest.approx(1.0)


def test_acceptance_by_row_tells_rows_without_drafts_from_rejected_ones(store: Store) -> None:
    job = add_job(store, num_rows=5)
    chunk = claim(store, job)
    stats = {
        "none": Acceptance(4, 4, 0, 0, 0, (4,)),
        "rejected": Acceptance(4, 4, 6, 0, 1, (4,), (3,)),
        "trimmed": Acceptance(4, 4, 2, 0, 2, (4,), (1,)),
        "accepted": Acceptance(4, 3, 4, 1, 0, (2, 1), (3,), (1,)),
    }
    batch = [answer(row, acceptance=one, num_output_tokens=4) for row, one in enumerate(stats.values())]
    store.results.write(chunk.lease, [*batch, failure(4)])
    found = query(store, "SELECT * FROM acceptance_by_row WHERE job_name = 'job' ORDER BY row_index")
    assert [row["drafts"] for row in found] == list(stats)
    assert [row["draft_acceptance_rate"] for row in found] == [None, 0.0, 0.0, 0.25]
    columns = "row_index, num_draft_tokens, num_accepted_draft_tokens, carried ->> 'category' AS category"
    rows = query(store, f"SELECT {columns} FROM acceptance_by_row ORDER BY row_index")
    assert [(r["num_draft_tokens"], r["num_accepted_draft_tokens"], r["category"]) for r in rows] == [
        (a.num_draft_tokens, a.num_accepted_draft_tokens, r.carried["category"])
        for a, r in zip(stats.values(), batch, strict=True)
    ]


def test_acceptance_by_any_carried_column(store: Store, job: Job) -> None:
    found = {row.pop("value"): row for row in query(
        store, "SELECT * FROM acceptance_by_carried WHERE column_name = 'category'"
    )}  # fmt: skip
    wanted = expected(store.results.iterate(job.id), lambda r: r.carried["category"])
    same = {"job_id": job.id, "job_name": job.name, "column_name": "category"}
    assert found == {key: same | sums for key, sums in wanted.items()}


def test_carried_values_read_the_same_on_both_databases(store: Store) -> None:
    values = {
        "text": "plain", "quoted": 'say "hi" \\ there', "ünïcode": "日本", "whole": 12, "negative": -3, "huge": 2**70,
        "fraction": 0.1 + 0.2, "small": 1e-9, "exponent": 1e22, "one": 1.0, "yes": True, "no": False, "nothing": None,
        "list": [1, "a", None], "object": {"b": 1, "a": [True]}, "with.dot": "x",
        'with"quote': 1.5, 'odd"]key': 2, "back\\slash": 3.5, "line\nbreak": 4, "": "no name",
    }  # fmt: skip
    texts = {
        "text": "plain", "quoted": 'say "hi" \\ there', "ünïcode": "日本", "whole": "12", "negative": "-3",
        "huge": str(2**70), "fraction": "0.30000000000000004", "small": "1e-09", "exponent": "1e+22", "one": "1.0",
        "yes": "true", "no": "false", "nothing": None, "list": '[1,"a",null]', "object": '{"b":1,"a":[true]}',
        "with.dot": "x", 'with"quote': "1.5", 'odd"]key': "2", "back\\slash": "3.5", "line\nbreak": "4", "": "no name",
    }  # fmt: skip
    job = add_job(store, num_rows=1)
    chunk = claim(store, job)
    store.results.write(chunk.lease, [answer(0, carried=values)])
    found = query(store, "SELECT column_name, value FROM acceptance_by_carried")
    assert {row["column_name"]: row["value"] for row in found} == texts


def test_throughput(store: Store, job: Job) -> None:
    add_job(store, "waiting")
    found = {row["job_id"]: row for row in query(store, "SELECT * FROM throughput")}
    done, waiting = found[job.id], found["id-waiting"]
    ended = store.jobs.get(job.id)
    assert ended.started_at is not None
    assert ended.finished_at is not None
    assert done["elapsed_seconds"] == pytest.approx((ended.finished_at - ended.started_at).total_seconds(), abs=1e-3)
    assert done["num_results"] == 20
    assert done["num_output_tokens"] == store.jobs.progress(job.id).counts.num_output_tokens
    assert done["results_per_second"] == pytest.approx(20 / done["elapsed_seconds"])
    assert done["output_tokens_per_second"] == pytest.approx(done["num_output_tokens"] / done["elapsed_seconds"])
    assert (waiting["num_results"], waiting["elapsed_seconds"], waiting["results_per_second"]) == (0, None, None)


def test_the_decode_rate_counts_what_the_records_took_of_engines(store: Store) -> None:
    """Whatever became of a record: replaced by a better one, or refused."""
    job = add_job(store, num_rows=4, chunk_rows=4)
    chunk = claim(store, job)
    timed = [answer(row, draft_seconds=0.25 * row, verify_seconds=0.5) for row in range(4)]
    store.results.write(chunk.lease, [failure(0), *timed[1:], timed[1]])
    store.results.write(chunk.lease, timed)
    tokens = sum(result.num_output_tokens or 0 for result in timed)
    [found] = query(store, "SELECT engine_seconds, decode_tokens_per_second FROM throughput")
    assert found == {"engine_seconds": 3.5, "decode_tokens_per_second": tokens / 3.5}
    assert store.jobs.progress(job.id).counts.engine_microseconds == 3_500_000


def test_throughput_by_minute(store: Store, job: Job) -> None:
    found = query(store, "SELECT * FROM throughput_by_minute")
    assert sum(row["num_results"] for row in found) == 20
    assert sum(row["num_output_tokens"] for row in found) == store.jobs.progress(job.id).counts.num_output_tokens
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d", row["minute"]) for row in found)
    assert all(row["output_tokens_per_second"] == row["num_output_tokens"] / 60 for row in found)


def test_job_errors(store: Store) -> None:
    job = add_job(store, num_rows=4)
    chunk = claim(store, job)
    batch = [answer(0), failure(1, code="b", message="x"), failure(2, code="a"), failure(3, code="b", message="w")]
    store.results.write(chunk.lease, batch)
    found = query(store, "SELECT * FROM job_errors ORDER BY error_code")
    assert [(r["error_code"], r["num_errors"], r["first_row_index"], r["example_message"]) for r in found] == [
        ("a", 1, 2, "no prompt"), ("b", 2, 1, "x"),
    ]  # fmt: skip


def test_engine_throughput_is_the_difference_of_readings(store: Store) -> None:
    add_job(store)
    start = datetime(2026, 1, 1, 12, tzinfo=UTC)
    first = EngineSample("worker", start, "id-job", 3, 1, 25, 100, TokenCounts(1000, 600, 500, 400))
    second = dataclasses.replace(
        first, sampled_at=start + timedelta(seconds=2), tokens=TokenCounts(1150, 700, 600, 450)
    )
    restarted = dataclasses.replace(first, sampled_at=start + timedelta(seconds=4), tokens=TokenCounts(5, 5, 0, 400))
    store.telemetry.write_engine_samples([first, second, restarted])
    store.telemetry.write_engine_samples([second])
    found = query(store, "SELECT * FROM engine_throughput ORDER BY sampled_at")
    assert len(found) == 2
    assert (found[0]["seconds"], found[0]["output_tokens_per_second"]) == (None, None)
    assert found[1]["job_name"] == "job"
    assert found[1]["kv_usage"] == 0.25
    assert found[1]["seconds"] == pytest.approx(2.0, abs=1e-3)
    assert found[1]["output_tokens_per_second"] == pytest.approx(75.0, rel=1e-3)
    assert (found[1]["mean_acceptance_length"], found[1]["draft_acceptance_rate"]) == (1.5, 0.5)


def test_statistics_of_retried_rows_are_those_of_the_record(store: Store) -> None:
    job = add_job(store, num_rows=2)
    chunk = claim(store, job)
    store.results.write(chunk.lease, [failure(0), answer(1)])
    store.results.write(chunk.lease, [answer(*pair) for pair in pairs(chunk)])
    [row] = query(store, "SELECT * FROM acceptance_by_job")
    [wanted] = expected([answer(0), answer(1)], lambda r: 0).values()
    assert row == {"job_id": job.id, "job_name": job.name} | wanted


def test_the_page_names_every_column_of_every_view(store: Store) -> None:
    page = (Path(__file__).parents[3] / "docs" / "statistics.md").read_text()
    sums = page.split("They are called *the sums* below", 1)[1].split("\n### ", 1)[0]
    for view in views.NAMES:
        columns, rows = run_sql(store, f"SELECT * FROM {view}")
        assert list(rows) == []
        section = page.split(f"\n### `{view}`", 1)[1].split("\n### ", 1)[0]
        named = section + (sums if "*the sums*" in section else "")
        assert [column for column in columns if f"`{column}`" not in named] == [], view
