"""One chunk from claim to done: read, prepare, generate, record. The same for Celery tasks and the in-process run."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum

from storage.errors import LeaseLost, StoreUnavailable
from storage.records import Chunk, Job, RowInHand
from storage.retry import patiently
from storage.store.reaping import under_suspicion
from storage.store.store import Store
from workers.chunks.generation import Generation
from workers.chunks.lease import LeaseKeeper
from workers.chunks.pulse import record_what_runs
from workers.chunks.records import ResultWriter
from workers.engine.api.config import EngineConfig
from workers.engine.api.errors import InvalidConfig, ModelNotFound, UnsupportedModel
from workers.errors import EngineFailed, GaveUp, InvalidSpec, LoadFailed, UnreadableInput
from workers.hosting.shared import EngineHosts
from workers.rows.read import Row, read_chunk
from workers.rows.settings import engine_config

log = logging.getLogger(__name__)


class ChunkStatus(StrEnum):
    DONE = "done"
    """Every (row, sample) has a record."""
    RELEASED = "released"
    """The worker is stopping: what finished is recorded, the rest waits for another worker."""
    CANCELLED = "cancelled"
    """The job is being cancelled: what finished is recorded."""
    LOST = "lost"
    """The lease went to somebody else; nothing more was written."""
    FAILED = "failed"
    """The engine broke: what finished is recorded, the rest is tried again and the attempt counts, unless the row that
    broke it was alone and has its error."""
    NOT_LOADED = "not_loaded"
    """The engine could not be loaded here: the chunk was given back as it is."""
    JOB_FAILED = "job_failed"
    """Nothing of this job can run (no such model, unreadable input): the job was ended."""


@dataclass(frozen=True, slots=True)
class ChunkOutcome:
    status: ChunkStatus
    num_ok: int = 0
    """Results of this run, recorded."""
    num_errors: int = 0
    error: str | None = None


def is_suspect(job: Job, chunk: Chunk) -> bool:
    """Whether one of its rows is thought to kill workers, so that each has to run alone."""
    return under_suspicion(chunk.attempts, job.spec.max_attempts)


def process_chunk(
    store: Store, hosts: EngineHosts, job: Job, chunk: Chunk, *, worker_id: str, stop: threading.Event
) -> ChunkOutcome:
    """Process a claimed chunk until it is done, `stop` is set, its job is stopped, its lease lost, or the engine fails.

    What finished before is recorded, in batches while the chunk runs, unless the lease is lost. Any other error is
    raised; the lease has ended then, and the scheduler counts the attempt. A chunk that is under suspicion goes through
    the engine a row at a time; the caller sees to it that nothing else does meanwhile.
    """
    try:
        config = engine_config(job.spec)
    except InvalidSpec as error:
        fail_job(store, job, InvalidSpec.code, str(error))
        store.chunks.release(chunk.lease)
        return ChunkOutcome(ChunkStatus.JOB_FAILED, error=str(error))
    return _process(_Chunk(store, hosts, job, chunk, config, worker_id, stop))


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A claimed chunk and all that it takes to process it."""

    store: Store
    hosts: EngineHosts
    job: Job
    chunk: Chunk
    config: EngineConfig
    worker_id: str
    stop: threading.Event

    @property
    def suspect(self) -> bool:
        return is_suspect(self.job, self.chunk)


def _process(work: _Chunk) -> ChunkOutcome:
    store, chunk = work.store, work.chunk
    try:
        with LeaseKeeper(store, chunk.lease, work.job.spec.lease_seconds) as lease:
            outcome = _Run(work, lease).outcome()
    except Exception:
        with suppress(Exception):  # what happened first is what has to be told; the lease runs out by itself as well
            store.chunks.heartbeat(chunk.lease, 0.0)
        raise
    if outcome.status is ChunkStatus.FAILED:
        # A lease that has run out is what the reaper counts as an attempt; a release would not count.
        patiently(lambda: store.chunks.heartbeat(chunk.lease, 0.0), work.stop.is_set)
    counts = f"{outcome.num_ok} ok, {outcome.num_errors} errors"
    log.info("chunk %d of job %s: %s, %s", chunk.id, work.job.name, outcome.status, counts)
    return outcome


class _Interrupted(Exception):
    """The chunk has to end now; the status says why."""

    def __init__(self, status: ChunkStatus) -> None:
        super().__init__(status)
        self.status = status


class _Run:
    """One attempt at a chunk, under its lease."""

    def __init__(self, work: _Chunk, lease: LeaseKeeper) -> None:
        self._work = work
        self._store = work.store
        self._chunk = work.chunk
        self._lease = lease
        self._writer = ResultWriter(work.store, work.chunk.lease, self._not_for_long)
        self._in_hand = False
        """A row runs, or ran, alone."""

    def outcome(self) -> ChunkOutcome:
        """Run, and end in the way that what happened asks for."""
        try:
            self._generate()
            self._writer.flush()
            done = patiently(lambda: self._store.chunks.finish(self._chunk.lease), self._given_up)
            return self._ended(ChunkStatus.DONE if done else ChunkStatus.LOST)
        except _Interrupted as interruption:
            return self._released(interruption.status)
        except EngineFailed as error:
            log.error("chunk %d: the engine failed", self._chunk.id, exc_info=error)
            return self._failed(str(error))
        except LoadFailed as error:
            log.info("chunk %d: the engine could not be loaded", self._chunk.id, exc_info=error)
            return replace(self._released(ChunkStatus.NOT_LOADED), error=str(error))
        except (ModelNotFound, UnsupportedModel, InvalidConfig) as error:
            return self._job_failed(error.code, f"worker {self._work.worker_id}: {error}")
        except InvalidSpec as error:
            return self._job_failed(InvalidSpec.code, str(error))
        except UnreadableInput as error:
            return self._job_failed("unreadable_input", f"worker {self._work.worker_id}: {error}")
        except LeaseLost:
            return ChunkOutcome(ChunkStatus.LOST)
        except StoreUnavailable as error:
            return ChunkOutcome(ChunkStatus.LOST, error=f"the store was out of reach: {error}")

    def _generate(self) -> None:
        chunk, job, hosts = self._chunk, self._work.job, self._work.hosts
        recorded = patiently(lambda: self._store.results.recorded(chunk), self._given_up)
        if len(recorded) == chunk.num_rows * job.num_samples:
            return
        files = patiently(lambda: self._store.jobs.files(chunk.job_id), self._given_up)
        rows = read_chunk({file.index: file for file in files}[chunk.file_index], chunk, job.spec.input)
        generation = Generation(job.spec, chunk, recorded, self._writer, self._check)
        try:
            with hosts.use(self._work.config, self._given_up) as host:
                record_what_runs(self._store, self._work.worker_id, chunk.job_id, host)
                if self._work.suspect:
                    generation.run_one_by_one(host, rows, self._take_in_hand)
                else:
                    generation.run(host, rows)
        except GaveUp:
            self._check()
            raise

    def _take_in_hand(self, row: Row) -> None:
        self._check()
        noted = RowInHand(row.index, row.row_id, row.carried)
        patiently(lambda: self._store.chunks.take_in_hand(self._chunk.lease, noted), self._given_up)
        self._in_hand = True

    def _not_for_long(self) -> bool:
        """Whether a store that is away is waited for no longer: who was told to stop has tried, and leaves."""
        return self._lease.lost or self._work.stop.is_set()

    def _given_up(self) -> bool:
        return self._lease.lost or self._lease.cancelled or self._work.stop.is_set()

    def _check(self) -> None:
        if self._lease.lost:
            raise LeaseLost(f"chunk {self._chunk.id}: the lease ran out")
        if self._lease.cancelled:
            raise _Interrupted(ChunkStatus.CANCELLED)
        if self._work.stop.is_set():
            raise _Interrupted(ChunkStatus.RELEASED)

    def _released(self, status: ChunkStatus) -> ChunkOutcome:
        """Record what finished and give the chunk back."""
        try:
            self._writer.flush()
            patiently(lambda: self._store.chunks.release(self._chunk.lease), self._not_for_long)
        except (LeaseLost, StoreUnavailable) as error:
            return ChunkOutcome(ChunkStatus.LOST, error=str(error))
        return self._ended(status)

    def _failed(self, message: str) -> ChunkOutcome:
        """Record what finished; the caller lets the lease run out. A row that was alone has its error already, and the
        others are not held to account for it."""
        if self._in_hand:
            return replace(self._released(ChunkStatus.FAILED), error=message)
        try:
            self._writer.flush()
        except (LeaseLost, StoreUnavailable) as error:
            return ChunkOutcome(ChunkStatus.LOST, error=str(error))
        return self._ended(ChunkStatus.FAILED, message)

    def _job_failed(self, code: str, message: str) -> ChunkOutcome:
        """End the job, since no other attempt would go better, and keep what finished."""
        fail_job(self._store, self._work.job, code, message)
        return replace(self._released(ChunkStatus.JOB_FAILED), error=message)

    def _ended(self, status: ChunkStatus, error: str | None = None) -> ChunkOutcome:
        return ChunkOutcome(status, self._writer.num_ok, self._writer.num_errors, error)


def fail_job(store: Store, job: Job, code: str, message: str) -> None:
    """End a job that no worker could run, and say so in the log."""
    log.error("job %s cannot run: %s: %s", job.name, code, message)
    store.jobs.fail(job.id, code, message)
