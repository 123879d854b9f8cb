from __future__ import annotations

import pytest

from storage.errors import JobStopped, UnknownJob
from storage.records import Chunk, ChunkState, Job, JobState, RowStatus
from storage.store.store import Store
from tests.support.records import LEASE, add_job, answer, claim, claim_next, failure, pairs, work


def record(store: Store, chunk: Chunk, *, bad_rows: tuple[int, ...] = ()) -> None:
    batch = [failure(*pair) if pair[0] in bad_rows else answer(*pair) for pair in pairs(chunk)]
    store.results.write(chunk.lease, batch)
    assert store.chunks.finish(chunk.lease)


def states(store: Store, job: Job) -> list[ChunkState]:
    return [chunk.state for chunk in store.chunks.of_job(job.id)]


def test_cancel_with_nothing_running_is_immediate(store: Store) -> None:
    job = add_job(store)
    assert store.jobs.cancel(job.id) is JobState.CANCELLED
    assert states(store, job) == [ChunkState.CANCELLED] * 2
    assert store.jobs.get(job.id).finished_at is not None
    assert store.chunks.pending() == []
    assert claim_next(store, "worker", LEASE) is None


def test_cancel_lets_running_chunks_record_what_is_finished(store: Store) -> None:
    job = add_job(store)
    chunk = claim(store, job)
    assert store.jobs.cancel(job.id) is JobState.CANCELLING
    assert store.jobs.cancel(job.id) is JobState.CANCELLING
    beat = store.chunks.heartbeat(chunk.lease, LEASE)
    assert (beat.alive, beat.cancel_requested) == (True, True)
    assert store.jobs.finalize_if_done(job.id) is None
    store.results.write(chunk.lease, [answer(0)])
    store.chunks.release(chunk.lease)
    ended = store.jobs.finalize_if_done(job.id)
    assert ended is not None
    assert ended.state is JobState.CANCELLED
    assert store.jobs.progress(job.id).counts.num_ok == 1


def test_a_message_of_a_cancelled_job_claims_nothing(store: Store) -> None:
    job = add_job(store)
    waiting = store.chunks.pending()
    store.chunks.mark_dispatched([chunk.id for chunk in waiting])
    store.jobs.cancel(job.id)
    assert [store.chunks.claim(chunk.message, "worker", LEASE) for chunk in waiting] == [None, None]
    store.jobs.resume(job.id)
    assert [store.chunks.claim(chunk.message, "worker", LEASE) for chunk in waiting] == [None, None]


def test_resume_goes_on_with_what_is_missing(store: Store) -> None:
    job = add_job(store)
    chunk = claim(store, job)
    store.results.write(chunk.lease, [answer(0), failure(1)])
    store.jobs.cancel(job.id)
    store.chunks.release(chunk.lease)
    store.jobs.finalize_if_done(job.id)
    assert store.jobs.resume(job.id) == 2
    resumed = store.jobs.get(job.id)
    assert (resumed.state, resumed.finished_at) == (JobState.QUEUED, None)
    assert store.results.recorded(chunk) == {(0, 0), (1, 0)}
    work(store, job)
    progress = store.jobs.progress(job.id)
    assert (progress.counts.num_ok, progress.counts.num_errors) == (9, 1)
    assert store.jobs.get(job.id).state is JobState.COMPLETED


def test_resume_leaves_running_and_completed_jobs_alone(store: Store) -> None:
    job = add_job(store)
    claim(store, job)
    assert store.jobs.resume(job.id) == 0
    assert store.jobs.get(job.id).state is JobState.IN_PROGRESS
    other = add_job(store, "other")
    work(store, other)
    assert store.jobs.resume(other.id) == 0
    assert store.jobs.get(other.id).state is JobState.COMPLETED


def test_resume_while_a_chunk_is_still_being_given_up(store: Store) -> None:
    job = add_job(store)
    chunk = claim(store, job)
    store.jobs.cancel(job.id)
    assert store.jobs.resume(job.id) == 1
    store.chunks.release(chunk.lease)
    assert states(store, job) == [ChunkState.PENDING] * 2


def test_a_failed_job_stops_and_says_why(store: Store) -> None:
    job = add_job(store)
    chunk = claim(store, job)
    assert store.jobs.fail(job.id, "max_error_rate", "half of the rows failed")
    failed = store.jobs.get(job.id)
    assert (failed.state, failed.error_code) == (JobState.FAILED, "max_error_rate")
    assert store.chunks.heartbeat(chunk.lease, LEASE).cancel_requested
    store.chunks.release(chunk.lease)
    assert states(store, job) == [ChunkState.CANCELLED] * 2
    assert not store.jobs.fail(job.id, "again", "no")
    assert store.jobs.cancel(job.id) is JobState.FAILED
    assert store.jobs.resume(job.id) == 2
    assert store.jobs.get(job.id).error_code is None


def test_retry_generates_errors_again_and_keeps_successes(store: Store) -> None:
    job = add_job(store)
    work(store, job, bad_rows=(1, 7))
    before = {r.row_index: r for r in store.results.iterate(job.id)}
    assert store.jobs.retry_failed(job.id) == 2
    assert store.jobs.get(job.id).state is JobState.QUEUED
    assert store.jobs.finalize_if_done(job.id) is None
    chunk = claim(store, job)
    assert store.results.recorded(chunk) == {(0, 0), (2, 0), (3, 0), (4, 0)}
    store.chunks.release(chunk.lease)
    work(store, job)
    after = {r.row_index: r for r in store.results.iterate(job.id)}
    assert [row for row in after if after[row] != before[row]] == [1, 7]
    assert all(r.status is RowStatus.OK for r in after.values())
    progress = store.jobs.progress(job.id)
    assert (progress.counts.num_ok, progress.counts.num_errors) == (10, 0)
    assert progress.counts.num_output_tokens == sum(r.num_output_tokens or 0 for r in after.values())
    assert progress.counts.num_spec_steps == sum(r.acceptance.num_spec_steps for r in after.values() if r.acceptance)


def test_a_retry_that_fails_again_records_the_new_error(store: Store) -> None:
    job = add_job(store, num_rows=2)
    chunk = claim(store, job)
    store.results.write(chunk.lease, [failure(0, code="old"), answer(1)])
    store.chunks.finish(chunk.lease)
    store.jobs.finalize_if_done(job.id)
    store.jobs.retry_failed(job.id)
    chunk = claim(store, job)
    assert store.results.write(chunk.lease, [failure(0, code="new"), failure(1, code="never")]) == 1
    assert store.results.recorded(chunk) == {(0, 0), (1, 0)}
    assert store.chunks.finish(chunk.lease)
    assert [(r.status, r.error_code) for r in store.results.iterate(job.id)] == [
        (RowStatus.ERROR, "new"), (RowStatus.OK, None),
    ]  # fmt: skip
    assert store.jobs.progress(job.id).counts.num_errors == 1


def test_a_retry_does_not_end_before_every_error_was_generated_again(store: Store) -> None:
    job = add_job(store, num_rows=3)
    work(store, job, bad_rows=(0, 1))
    store.jobs.retry_failed(job.id)
    chunk = claim(store, job)
    store.results.write(chunk.lease, [answer(0)])
    store.chunks.release(chunk.lease)
    chunk = claim(store, job)
    assert store.results.recorded(chunk) == {(0, 0), (2, 0)}
    store.results.write(chunk.lease, [failure(1)])
    assert store.chunks.finish(chunk.lease)
    assert store.jobs.progress(job.id).counts.num_errors == 1


def test_retry_without_errors_changes_nothing(store: Store) -> None:
    job = add_job(store)
    work(store, job)
    assert store.jobs.retry_failed(job.id) == 0
    assert store.jobs.get(job.id).state is JobState.COMPLETED


def test_retry_of_a_stopped_job_resumes_it_too(store: Store) -> None:
    job = add_job(store)
    record(store, claim(store, job), bad_rows=(3,))
    store.jobs.cancel(job.id)
    assert store.jobs.retry_failed(job.id) == 1
    assert states(store, job) == [ChunkState.PENDING] * 2
    work(store, job)
    assert store.jobs.progress(job.id).counts.num_ok == 10


def test_retry_of_a_running_job_opens_its_finished_chunks(store: Store) -> None:
    job = add_job(store)
    record(store, claim(store, job), bad_rows=(3,))
    assert store.jobs.retry_failed(job.id) == 1
    assert store.jobs.get(job.id).state is JobState.IN_PROGRESS
    work(store, job)
    assert store.jobs.progress(job.id).counts.num_ok == 10


def test_retry_waits_for_a_cancel(store: Store) -> None:
    job = add_job(store)
    claim(store, job)
    store.jobs.cancel(job.id)
    with pytest.raises(JobStopped, match="wait until it is cancelled"):
        store.jobs.retry_failed(job.id)


def test_a_job_ends_only_when_every_chunk_is_done(store: Store) -> None:
    job = add_job(store)
    record(store, claim(store, job))
    assert store.jobs.finalize_if_done(job.id) is None
    record(store, claim(store, job))
    ended = store.jobs.finalize_if_done(job.id)
    assert ended is not None
    assert ended.state is JobState.COMPLETED
    assert store.jobs.finalize_if_done(job.id) == ended
    assert store.jobs.cancel(job.id) is JobState.COMPLETED


def test_an_unknown_job_is_named(store: Store) -> None:
    for act in (
        store.jobs.cancel,
        store.jobs.resume,
        store.jobs.retry_failed,
        store.jobs.finalize_if_done,
        store.jobs.progress,
    ):
        with pytest.raises(UnknownJob, match="nobody"):
            act("nobody")
