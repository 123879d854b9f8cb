"""A worker between messages and chunks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa

from scheduler.lifecycle import resume
from storage.records import ChunkMessage, ChunkState, Job, JobState
from storage.sql.tables import jobs
from storage.store.store import Store
from tests.support.fake_engine import Script
from tests.support.jobs import make_job, process_next, results, texts
from tests.support.records import claim_next
from tests.support.waiting import wait_until
from workers.chunks.chunk import ChunkStatus
from workers.chunks.worker import Draining, Worker
from workers.hosting.interface import without_remote_code


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def worker(store: Store, script: Script) -> Iterator[Worker]:
    with Worker(store, factory=script.factory) as worker:
        yield worker


def message(store: Store, job: Job, place: int = 0) -> ChunkMessage:
    return store.chunks.of_job(job.id)[place].message


def test_a_message_is_processed_once_however_often_it_comes(worker: Worker, store: Store, tmp_path: Path) -> None:
    job = make_job(store, tmp_path, {"prompt": ["one"]})
    hint = message(store, job)
    outcomes = [worker.process(hint) for _ in range(3)]
    assert [outcome and outcome.status for outcome in outcomes] == [ChunkStatus.DONE, None, None]
    assert texts(store, job) == {0: "ONE"}


def test_a_stale_message_and_one_of_a_job_that_is_gone_do_nothing(worker: Worker, store: Store, tmp_path: Path) -> None:
    job = make_job(store, tmp_path, {"prompt": ["one"]})
    hint = message(store, job)
    assert worker.process(ChunkMessage(job.id, hint.chunk_id, hint.epoch + 1)) is None
    assert worker.process(ChunkMessage("gone", hint.chunk_id, hint.epoch)) is None
    assert results(store, job) == {}


def test_a_worker_that_stops_takes_nothing(worker: Worker, store: Store, tmp_path: Path) -> None:
    job = make_job(store, tmp_path, {"prompt": ["one"]})
    worker.stop.set()
    with pytest.raises(Draining):
        worker.process(message(store, job))
    assert store.chunks.of_job(job.id)[0].epoch == 0


def lose_a_worker(store: Store, job: Job) -> None:
    """A worker dies over the job's first chunk; with max_attempts 1 that brings it under suspicion."""
    chunk = claim_next(store, "killed", 60.0, job.id)
    assert chunk is not None
    store.chunks.heartbeat(chunk.lease, 0.0)
    store.reaper.reap(job_id=job.id)


def test_a_chunk_under_suspicion_runs_alone_and_waits_without_a_lease(
    worker: Worker, store: Store, tmp_path: Path, script: Script, pool: ThreadPoolExecutor
) -> None:
    busy = make_job(store, tmp_path, {"prompt": ["HOLD"]}, name="busy", lease_seconds=1.0)
    suspect = make_job(store, tmp_path, {"prompt": ["one"]}, name="suspect", max_attempts=1)
    lose_a_worker(store, suspect)
    beside = pool.submit(process_next, worker, busy)
    wait_until(lambda: len(script.requests) == 1)
    waiting = pool.submit(process_next, worker, suspect)
    wait_until(lambda: store.chunks.of_job(suspect.id)[0].epoch == 4)
    assert store.chunks.of_job(suspect.id)[0].state is ChunkState.PENDING
    assert not waiting.done()
    store.jobs.cancel(busy.id)
    assert beside.result() is not None
    outcome = waiting.result()
    assert outcome is not None
    assert outcome.status is ChunkStatus.DONE


def test_a_suspect_that_somebody_else_took_meanwhile_is_left_to_them(
    worker: Worker, store: Store, tmp_path: Path, script: Script, pool: ThreadPoolExecutor
) -> None:
    busy = make_job(store, tmp_path, {"prompt": ["HOLD"]}, name="busy", lease_seconds=1.0)
    suspect = make_job(store, tmp_path, {"prompt": ["one"]}, name="suspect", max_attempts=1)
    lose_a_worker(store, suspect)
    beside = pool.submit(process_next, worker, busy)
    wait_until(lambda: len(script.requests) == 1)
    waiting = pool.submit(process_next, worker, suspect)
    wait_until(lambda: store.chunks.of_job(suspect.id)[0].epoch == 4)
    assert claim_next(store, "another", 30.0, suspect.id) is not None
    store.jobs.cancel(busy.id)
    outcome = waiting.result()
    assert outcome is not None
    assert outcome.status is ChunkStatus.LOST
    beside.result()


def test_a_stored_spec_that_cannot_be_read_ends_the_job(worker: Worker, store: Store, tmp_path: Path) -> None:
    job = make_job(store, tmp_path, {"prompt": ["one"]})
    (message,) = (chunk.message for chunk in store.chunks.pending(job.id, 1))
    spec = job.spec.to_json()
    for broken in ({**spec, "seed": "x"}, spec):
        store.database.write(
            lambda connection, spec: connection.execute(sa.update(jobs).values(spec=spec)).close(), broken
        )
        assert worker.process(message) is None
    ended = store.jobs.get(job.id)
    assert (ended.state, ended.error_code) == (JobState.FAILED, "invalid_spec")
    assert "seed must be an integer, got 'x'" in str(ended.error_message)


def test_a_job_whose_engine_cannot_be_loaded_ends_unless_others_work_on_it(
    worker: Worker, store: Store, tmp_path: Path, script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.chunks.worker.LOAD_PAUSE", 0.0)
    script.load_error = RuntimeError("out of\nmemory")
    job = make_job(store, tmp_path, {"prompt": ["one", "two"]}, chunk_rows=1)
    other = claim_next(store, "another", 60.0, job.id)
    assert other is not None
    for _ in range(4):
        outcome = worker.process(message(store, job, 1))
        assert outcome is not None
        assert outcome.status is ChunkStatus.NOT_LOADED
        worker.after_failed_load(job.id, outcome.error)
    chunk = store.chunks.of_job(job.id)[1]
    assert (chunk.state, chunk.attempts) == (ChunkState.PENDING, 0)
    assert store.jobs.get(job.id).state is JobState.IN_PROGRESS
    store.chunks.release(other.lease)
    outcome = worker.process(message(store, job))
    assert outcome is not None
    worker.after_failed_load(job.id, outcome.error)
    failed = store.jobs.get(job.id)
    assert (failed.state, failed.error_code) == (JobState.FAILED, "load_failed")
    assert "RuntimeError: out of memory, 5 times in a row" in str(failed.error_message)


def test_a_worker_reports_itself_and_signs_off(store: Store, script: Script) -> None:
    with Worker(store, factory=script.factory) as worker:
        wait_until(lambda: bool(store.telemetry.workers()))
        (info,) = store.telemetry.workers()
        assert (info.worker_id, info.pid) == (worker.id, os.getpid())
    assert store.telemetry.workers() == []


def test_code_that_comes_with_a_model_runs_only_where_the_owner_of_the_machine_allows_it(
    store: Store, script: Script, tmp_path: Path
) -> None:
    job = make_job(store, tmp_path, {"prompt": ["one"]}, engine={"target": "fake", "trust_remote_code": True})
    with Worker(store, factory=without_remote_code(script.factory)) as worker:
        outcome = worker.process(message(store, job))
    assert outcome is not None
    assert outcome.status is ChunkStatus.JOB_FAILED
    failed = store.jobs.get(job.id)
    assert (failed.state, failed.error_code) == (JobState.FAILED, "remote_code_refused")
    assert "--allow-remote-code" in (failed.error_message or "")
    assert script.loaded == []
    resume(store, job.id)
    with Worker(store, factory=script.factory) as worker:
        worker.process(message(store, job))
    assert texts(store, job) == {0: "ONE"}
