from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
import sqlalchemy as sa

from storage.errors import InvalidPlan, JobExists, RefusedSpec, UnknownJob, UnstorableText
from storage.records import Chunk, ChunkState, InputFile, JobProgress, JobState
from storage.spec import InputSpec
from storage.sql.tables import jobs
from storage.store.store import Store
from tests.support.records import add_job, claim_next, make_job, plan, work


def test_a_job_comes_back_as_it_was_made(store: Store) -> None:
    job = make_job(spec={"input": InputSpec(("a", "b")), "max_error_rate": 0.1, "system_prompt": 'ünïcode "quoted" %s'})
    files = [
        InputFile(0, "/data/ä.parquet", 2**40, "17", "prompt: string\nid: int64", (4, 2), 0),
        InputFile(1, "s3://bucket/b.parquet", 5, "etag", "prompt: string\nid: int64", (4,), 6),
    ]
    store.jobs.create(job, files, plan(job, 3))
    assert store.jobs.get(job.id) == job
    assert store.jobs.find(job.name) == job
    assert store.jobs.files(job.id) == files
    assert [(c.start_row, c.num_rows) for c in store.chunks.of_job(job.id)] == [(0, 3), (3, 3), (6, 3), (9, 1)]
    assert all(c.id > 0 for c in store.chunks.of_job(job.id))


def test_times_are_aware_and_utc(store: Store) -> None:
    job = add_job(store, created_at=datetime.now(UTC) - timedelta(hours=1))
    claim_next(store, "w", 60.0)
    started = store.jobs.get(job.id).started_at
    assert started is not None
    assert started.utcoffset() == timedelta(0)
    assert abs(started - datetime.now(UTC)) < timedelta(minutes=5)


def test_jobs_are_found_by_id_name_prefix_and_last(store: Store) -> None:
    first = add_job(store, "nightly", id="abc123", created_at=datetime(2026, 1, 1, tzinfo=UTC))
    second = add_job(store, "weekly", id="abd456", created_at=datetime(2026, 1, 2, tzinfo=UTC))
    assert store.jobs.get("abc123") == store.jobs.get("nightly") == store.jobs.get("abc") == first
    assert store.jobs.get("last") == second
    assert store.jobs.newest() == [second, first]
    assert store.jobs.newest(limit=1) == [second]


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("nightli", "did you mean 'nightly'"),
        ("ab", "several job ids: abc123, abd456"),
        ("zzz", "status"),
        ("", "status"),
    ],
)
def test_an_unknown_job_is_refused_with_what_is_near(store: Store, reference: str, message: str) -> None:
    add_job(store, "nightly", id="abc123")
    add_job(store, "weekly", id="abd456")
    with pytest.raises(UnknownJob, match=message):
        store.jobs.get(reference)


def test_last_of_an_empty_store(store: Store) -> None:
    with pytest.raises(UnknownJob, match="no job in this store yet"):
        store.jobs.get("last")


def test_a_taken_name_is_refused_and_leaves_nothing_behind(store: Store) -> None:
    add_job(store, "nightly")
    with pytest.raises(JobExists, match="nightly"):
        add_job(store, "nightly", id="other")
    assert len(store.jobs.newest()) == 1
    assert store.chunks.of_job("other") == []


@pytest.mark.parametrize(
    "ranges",
    [[(0, 5), (6, 4)], [(0, 5), (4, 6)], [(0, 5)], [(5, 5), (0, 5)], [(0, 0), (0, 10)], [(0, 12)], []],
    ids=["gap", "overlap", "short", "disorder", "empty chunk", "long", "none"],
)
def test_a_plan_must_cover_the_rows_once(store: Store, ranges: list[tuple[int, int]]) -> None:
    job = make_job(num_rows=10)
    chunks = [Chunk(0, job.id, i, 0, start, start, rows) for i, (start, rows) in enumerate(ranges)]
    with pytest.raises(InvalidPlan):
        store.jobs.create(job, [], chunks)
    assert store.jobs.newest() == []


@pytest.mark.parametrize("text", ["a\x00b", "half \ud83d pair"])
def test_a_spec_is_never_altered_silently(store: Store, text: str) -> None:
    with pytest.raises(UnstorableText, match="remove it"):
        add_job(store, spec={"system_prompt": text})
    with pytest.raises(UnstorableText):
        add_job(store, name=text)


def test_a_stored_spec_of_another_shape_is_one_clear_error(store: Store) -> None:
    job = add_job(store)
    spec = {**job.spec.to_json(), "max_attempts": "often", "colour": "red"}
    store.database.write(lambda connection: connection.execute(sa.update(jobs).values(spec=spec)).close())
    with pytest.raises(RefusedSpec) as caught:
        store.jobs.get(job.id)
    assert str(caught.value) == (
        "the spec stored with job 'job' cannot be read: max_attempts must be an integer, got 'often';"
        " colour is no key of a job spec, got 'red'"
    )
    assert store.jobs.unfinished() == [job.id]


def test_a_long_plan_is_streamed(store: Store) -> None:
    job = add_job(store, num_rows=5000, chunk_rows=1)
    assert store.jobs.progress(job.id).chunks[ChunkState.PENDING] == 5000
    assert [c.index for c in store.chunks.pending(job.id, limit=3)] == [0, 1, 2]


def test_a_job_fails_once(store: Store) -> None:
    job = add_job(store)
    assert store.jobs.fail(job.id, "engine", "no memory")
    assert not store.jobs.fail(job.id, "another", "too late")
    failed = store.jobs.get(job.id)
    assert (failed.state, failed.error_code, failed.error_message) == (JobState.FAILED, "engine", "no memory")
    assert failed.finished_at is not None
    with pytest.raises(UnknownJob):
        store.jobs.fail("nobody", "engine", "no memory")


def test_a_job_without_rows_completes(store: Store) -> None:
    job = add_job(store, num_rows=0)
    done = store.jobs.finalize_if_done(job.id)
    assert done is not None
    assert done.state is JobState.COMPLETED
    assert done.started_at is not None
    assert store.jobs.progress(job.id) == JobProgress(0, dict.fromkeys(ChunkState, 0))


def test_a_finished_job_has_its_times(store: Store) -> None:
    job = add_job(store)
    work(store, job)
    done = store.jobs.get(job.id)
    assert done.started_at is not None
    assert done.finished_at is not None
    assert done.created_at <= done.started_at + timedelta(minutes=5)
    assert done.started_at <= done.finished_at
