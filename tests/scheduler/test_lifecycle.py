from __future__ import annotations

from pathlib import Path

import pytest

from scheduler import lifecycle
from scheduler.errors import WrongState
from scheduler.finishing import TOO_MANY_ERRORS, finish_if_done
from storage.errors import InputChanged
from storage.records import Job, JobState
from storage.store.store import Store
from tests.support.records import claim_next
from tests.support.submissions import complete, submitted, work_through, write_prompts


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    return write_prompts(tmp_path / "prompts.parquet", 400)


def work_chunk(store: Store, job: Job, *, errors: int = 0) -> None:
    chunk = claim_next(store, "worker-1", 60.0, job.id)
    assert chunk is not None
    complete(store, chunk, errors=errors)


def test_cancel_keeps_what_is_recorded_and_resume_does_the_rest(store: Store, prompts: Path) -> None:
    job = submitted(store, prompts, chunk_rows=100).job
    work_chunk(store, job)
    assert lifecycle.cancel(store, job.id) is JobState.CANCELLED
    assert lifecycle.cancel(store, job.id) is JobState.CANCELLED
    assert store.jobs.progress(job.id).counts.num_ok == 100
    assert claim_next(store, "worker-1", 60.0, job.id) is None
    assert lifecycle.resume(store, job.id) == 3
    work_through(store, job.id)
    assert store.jobs.get(job.id).state is JobState.COMPLETED
    assert store.jobs.progress(job.id).counts.num_ok == 400


def test_cancel_waits_for_running_chunks(store: Store, prompts: Path) -> None:
    job = submitted(store, prompts, chunk_rows=100).job
    chunk = claim_next(store, "worker-1", 60.0, job.id)
    assert chunk is not None
    assert lifecycle.cancel(store, job.id) is JobState.CANCELLING
    with pytest.raises(WrongState, match="wait until it is cancelled"):
        lifecycle.resume(store, job.id)
    with pytest.raises(WrongState, match="wait until it is cancelled"):
        lifecycle.retry(store, job.id)
    assert store.chunks.heartbeat(chunk.lease, 60.0).cancel_requested
    store.chunks.release(chunk.lease)
    assert finish_if_done(store, job).state is JobState.CANCELLED


def test_what_makes_no_sense_is_refused(store: Store, prompts: Path) -> None:
    job = submitted(store, prompts).job
    with pytest.raises(WrongState, match="goes on by itself"):
        lifecycle.resume(store, job.id)
    work_through(store, job.id)
    with pytest.raises(WrongState, match="nothing is left to resume"):
        lifecycle.resume(store, job.id)
    with pytest.raises(WrongState, match="completed already"):
        lifecycle.cancel(store, job.id)
    assert store.jobs.get(job.id).state is JobState.COMPLETED


def test_resume_and_retry_refuse_changed_input(store: Store, prompts: Path) -> None:
    job = submitted(store, prompts).job
    work_chunk(store, job, errors=1)
    lifecycle.cancel(store, job.id)
    write_prompts(prompts, 399)
    for action in (lifecycle.resume, lifecycle.retry):
        with pytest.raises(InputChanged, match=r"prompts\.parquet: rows: 400 rows .* -> 399 rows"):
            action(store, job.id)
    prompts.unlink()
    with pytest.raises(InputChanged, match=r"prompts\.parquet: 400 rows -> cannot read"):
        lifecycle.resume(store, job.id)


def test_retry_replaces_errors_by_answers(store: Store, prompts: Path) -> None:
    job = submitted(store, prompts, chunk_rows=200).job
    work_chunk(store, job, errors=3)
    work_chunk(store, job)
    assert finish_if_done(store, job).state is JobState.COMPLETED
    assert lifecycle.retry(store, job.id) == 1
    assert store.jobs.get(job.id).state is JobState.QUEUED
    work_chunk(store, job)
    assert finish_if_done(store, job).state is JobState.COMPLETED
    progress = store.jobs.progress(job.id)
    assert (progress.counts.num_ok, progress.counts.num_errors) == (400, 0)
    assert lifecycle.retry(store, job.id) == 0


def test_too_many_errors_stop_a_job_early(store: Store, prompts: Path) -> None:
    job = submitted(store, prompts, chunk_rows=50, max_error_rate=0.5).job
    work_chunk(store, job, errors=50)
    assert finish_if_done(store, job).state is JobState.IN_PROGRESS, "50 results are too few to judge"
    work_chunk(store, job, errors=1)
    failed = finish_if_done(store, job)
    assert (failed.state, failed.error_code) == (JobState.FAILED, TOO_MANY_ERRORS)
    assert failed.error_message is not None
    assert "51 of the first 100 results are errors, more than max_error_rate 0.5" in failed.error_message
    assert claim_next(store, "worker-1", 60.0, job.id) is None


def test_errors_up_to_the_limit_are_fine(store: Store, prompts: Path) -> None:
    job = submitted(store, prompts, chunk_rows=200, max_error_rate=0.5).job
    work_chunk(store, job, errors=100)
    assert finish_if_done(store, job).state is JobState.IN_PROGRESS
    work_chunk(store, job, errors=100)
    assert finish_if_done(store, job).state is JobState.COMPLETED


def test_a_small_job_is_judged_when_it_is_through(store: Store, tmp_path: Path) -> None:
    job = submitted(store, write_prompts(tmp_path / "few.parquet", 10), chunk_rows=5, max_error_rate=0.1).job
    work_chunk(store, job, errors=5)
    assert finish_if_done(store, job).state is JobState.IN_PROGRESS
    work_chunk(store, job)
    assert finish_if_done(store, job).state is JobState.FAILED


def test_a_job_stopped_for_its_errors_goes_on_by_retry(store: Store, prompts: Path) -> None:
    job = submitted(store, prompts, chunk_rows=100, max_error_rate=0.1).job
    work_chunk(store, job, errors=60)
    assert finish_if_done(store, job).state is JobState.FAILED
    with pytest.raises(WrongState, match=r"nightdraft retry night --failed"):
        lifecycle.resume(store, job.id)
    assert lifecycle.retry(store, job.id) == 1
    assert finish_if_done(store, job).state is JobState.QUEUED, "errors under retry are not held against the job"
    for _ in range(4):
        work_chunk(store, job)
    assert finish_if_done(store, job).state is JobState.COMPLETED
    assert store.jobs.progress(job.id).counts.num_ok == 400
