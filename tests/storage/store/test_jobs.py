from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from storage.errors import InvalidPlan, JobExists, UnknownJob, UnstorableText
from storage.records import Chunk, ChunkState, InputFile, JobProgress, JobState
from storage.store.store import Store
from tests.storage.helpers import add_job, make_job, plan, work


def test_a_job_comes_back_as_it_was_made(store: Store) -> None:
    job = make_job(spec={"input": {"paths": ["a", "b"]}, "temperature": 0.1, "text": 'ünïcode "quoted" %s'})
    files = [
        InputFile(0, "/data/ä.parquet", 2**40, "17", "prompt: string\nid: int64", (4, 2), 0),
        InputFile(1, "s3://bucket/b.parquet", 5, "etag", "prompt: string\nid: int64", (4,), 6),
    ]
    store.create_job(job, files, plan(job, 3))
    assert store.get_job(job.id) == job
    assert store.find_job(job.name) == job
    assert store.input_files(job.id) == files
    assert [(c.start_row, c.num_rows) for c in store.list_chunks(job.id)] == [(0, 3), (3, 3), (6, 3), (9, 1)]
    assert all(c.id > 0 for c in store.list_chunks(job.id))


def test_times_are_aware_and_utc(store: Store) -> None:
    job = add_job(store, created_at=datetime.now(UTC) - timedelta(hours=1))
    store.set_job_state(job.id, JobState.IN_PROGRESS)
    started = store.get_job(job.id).started_at
    assert started is not None
    assert started.utcoffset() == timedelta(0)
    assert abs(started - datetime.now(UTC)) < timedelta(minutes=5)


def test_jobs_are_found_by_id_name_prefix_and_last(store: Store) -> None:
    first = add_job(store, "nightly", id="abc123", created_at=datetime(2026, 1, 1, tzinfo=UTC))
    second = add_job(store, "weekly", id="abd456", created_at=datetime(2026, 1, 2, tzinfo=UTC))
    assert store.get_job("abc123") == store.get_job("nightly") == store.get_job("abc") == first
    assert store.get_job("last") == second
    assert store.list_jobs() == [second, first]
    assert store.list_jobs(limit=1) == [second]


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
        store.get_job(reference)


def test_last_of_an_empty_store(store: Store) -> None:
    with pytest.raises(UnknownJob, match="no job in this store yet"):
        store.get_job("last")


def test_a_taken_name_is_refused_and_leaves_nothing_behind(store: Store) -> None:
    add_job(store, "nightly")
    with pytest.raises(JobExists, match="nightly"):
        add_job(store, "nightly", id="other")
    assert len(store.list_jobs()) == 1
    assert store.list_chunks("other") == []


@pytest.mark.parametrize(
    "ranges",
    [[(0, 5), (6, 4)], [(0, 5), (4, 6)], [(0, 5)], [(5, 5), (0, 5)], [(0, 0), (0, 10)], [(0, 12)], []],
    ids=["gap", "overlap", "short", "disorder", "empty chunk", "long", "none"],
)
def test_a_plan_must_cover_the_rows_once(store: Store, ranges: list[tuple[int, int]]) -> None:
    job = make_job(num_rows=10)
    chunks = [Chunk(0, job.id, i, 0, start, start, rows) for i, (start, rows) in enumerate(ranges)]
    with pytest.raises(InvalidPlan):
        store.create_job(job, [], chunks)
    assert store.list_jobs() == []


@pytest.mark.parametrize("text", ["a\x00b", "half \ud83d pair"])
def test_a_spec_is_never_altered_silently(store: Store, text: str) -> None:
    with pytest.raises(UnstorableText, match="remove it"):
        add_job(store, spec={"system_prompt": text})
    with pytest.raises(UnstorableText):
        add_job(store, name=text)


def test_a_long_plan_is_streamed(store: Store) -> None:
    job = add_job(store, num_rows=5000, chunk_rows=1)
    assert store.progress(job.id).chunks[ChunkState.PENDING] == 5000
    assert [c.index for c in store.pending_chunks(job.id, limit=3)] == [0, 1, 2]


def test_states_move_only_from_where_they_are_expected(store: Store) -> None:
    job = add_job(store)
    assert not store.set_job_state(job.id, JobState.COMPLETED, expected=[JobState.FINALIZING])
    assert store.set_job_state(
        job.id, JobState.FAILED, expected=[JobState.QUEUED], error_code="engine", error_message="no memory"
    )
    failed = store.get_job(job.id)
    assert (failed.state, failed.error_code, failed.error_message) == (JobState.FAILED, "engine", "no memory")
    assert failed.finished_at is not None
    assert not store.set_job_state("nobody", JobState.FAILED)


def test_a_job_without_rows_completes(store: Store) -> None:
    job = add_job(store, num_rows=0)
    done = store.finalize_if_done(job.id)
    assert done is not None
    assert done.state is JobState.COMPLETED
    assert done.started_at is not None
    assert store.progress(job.id) == JobProgress(0, 0, 0, 0, 0, 0, 0, dict.fromkeys(ChunkState, 0))


def test_a_finished_job_has_its_times(store: Store) -> None:
    job = add_job(store)
    work(store, job)
    done = store.get_job(job.id)
    assert done.started_at is not None
    assert done.finished_at is not None
    assert done.created_at <= done.started_at + timedelta(minutes=5)
    assert done.started_at <= done.finished_at
