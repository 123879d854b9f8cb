"""The whole job in this process: the worker's own code below the dispatcher, and no broker above it."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runner.output.progress import Display, Follower
from runner.output.summary import JobSummary, summarise
from scheduler.finishing import finish_if_done
from storage.errors import StoreUnavailable
from storage.records import ChunkState, Job
from storage.retry import complain
from workers import CHUNKS_IN_FLIGHT
from workers.chunks.chunk import ChunkStatus, fail_job
from workers.chunks.worker import Draining, Worker
from workers.engine.api import phases
from workers.engine.api.errors import EngineStopped
from workers.errors import EngineFailed, LoadFailed

if TYPE_CHECKING:
    from storage.store.reaping import Reaped
    from storage.store.store import Store

log = logging.getLogger(__name__)

TICK_SECONDS = 0.2
OUTAGE_SECONDS = 60.0
"""A run whose store stays away, or full, for longer ends; the same command goes on from what is recorded."""

AGAIN = "rows that a process left behind when it was killed or failed are generated again; what was recorded stays"
ONE_BY_ONE = "rows that were in hand at every failure are run one at a time, to find the one that causes it"


@dataclass(frozen=True, slots=True)
class LocalOutcome:
    job: Job
    tokens_per_second: float | None
    """Output tokens of this run per second since the model was loaded; None when nothing was generated."""


class LocalRun:
    """Processes the chunks of one job in threads until the job ends or `stop` is set."""

    def __init__(self, store: Store, job: Job, stop: threading.Event) -> None:
        self._store = store
        self._job = job
        self._stop = stop
        self._ended = threading.Event()
        self._changed = threading.Event()
        """A chunk ended: worth a look before the next tick."""
        self._failure: Exception | None = None
        self._not_loaded: str | None = None
        """Why the engine could not be loaded."""
        self._emitted: int | None = None
        """Tokens that the engine has emitted, those of unfinished rows among them."""
        self._said: set[str] = set()
        self._away_since: float | None = None

    def run(self, display: Display) -> LocalOutcome:
        """Returns when the job is terminal, or everything in flight is recorded after `stop`.

        Raises what a chunk raised unexpectedly; what had finished is recorded, the rest is free for the next run. An
        engine that cannot be loaded ends the job; where another process works on it, `LoadFailed` is raised instead.
        """
        follower = Follower(self._summary, display)
        job = finish_if_done(self._store, self._job)
        start, _ = follower.refresh()
        if job.state.terminal:
            return LocalOutcome(job, None)
        with Worker(self._store, job_id=job.id) as worker:
            seconds = self._serve(worker, follower)
        if self._not_loaded is not None:
            self._end_for_failed_load(self._not_loaded)
        if isinstance(self._failure, StoreUnavailable):
            raise self._failure
        end, _ = follower.refresh(tokens=self._emitted)
        if self._failure is not None:
            raise self._failure
        tokens = end.counts.num_output_tokens - start.counts.num_output_tokens
        return LocalOutcome(self._store.jobs.get(job.id), tokens / seconds if seconds and tokens > 0 else None)

    def _serve(self, worker: Worker, follower: Follower) -> float | None:
        """Run the chunk threads and watch over them; returns the seconds since the model was ready."""
        threads = [
            threading.Thread(target=self._work, args=(worker,), name=f"chunks-{number}", daemon=True)
            for number in range(CHUNKS_IN_FLIGHT)
        ]
        for thread in threads:
            thread.start()
        ready_at: float | None = None
        look_at = 0.0
        while any(thread.is_alive() for thread in threads):
            if self._stop.is_set():
                worker.stop.set()
            if ready_at is None and (ready_at := _ready_at(worker)) is not None:
                follower.restart()
            if self._changed.wait(TICK_SECONDS) or time.monotonic() >= look_at:
                self._changed.clear()
                try:
                    look_at = time.monotonic() + self._look(worker, follower, loading=ready_at is None)
                    self._away_since = None
                except StoreUnavailable as error:
                    self._bear(error, worker)
        ready_at = ready_at or _ready_at(worker)
        return None if ready_at is None else time.monotonic() - ready_at

    def _look(self, worker: Worker, follower: Follower, *, loading: bool) -> float:
        """Keep the job going and show where it is; returns the seconds until the next look."""
        self._maintain(worker)
        self._read_engine(worker)
        return follower.refresh(self._note(worker, loading=loading), self._emitted)[1]

    def _bear(self, error: StoreUnavailable, worker: Worker) -> None:
        """Wait for a store that is away or full, but not for ever."""
        now = time.monotonic()
        self._away_since = now if self._away_since is None else self._away_since
        if now - self._away_since >= OUTAGE_SECONDS:
            self._failure = error
            worker.stop.set()
        else:
            complain(log, f"{error}; waiting for it")

    def _maintain(self, worker: Worker) -> None:
        """What the scheduler does for all jobs: take back lost chunks, and see when the job is over."""
        if worker.busy == 0:
            self._store.reaper.expire_dead_workers()
        self._tell(self._store.reaper.reap(job_id=self._job.id))
        if finish_if_done(self._store, self._job).state.terminal:
            self._ended.set()

    def _tell(self, reaped: Reaped) -> None:
        """What became of lost chunks; what is to be expected after a kill or a failure is said once."""
        for happened, text in ((reaped.released, AGAIN), (reaped.suspected, ONE_BY_ONE)):
            if happened and text not in self._said:
                self._said.add(text)
                log.warning(text)
        for row in reaped.poisoned:
            log.error("row %d was in hand each time a worker died or failed: recorded as an error", row.row_index)

    def _read_engine(self, worker: Worker) -> None:
        host = worker.hosts.running
        if host is not None:
            with suppress(EngineFailed, EngineStopped):
                self._emitted = host.snapshot().emitted

    def _note(self, worker: Worker, *, loading: bool) -> str:
        if self._stop.is_set():
            return "draining"
        if worker.busy == 0:
            return "waiting for rows that another process holds" if self._running_elsewhere(worker) else ""
        return phases.current() or ("loading the model" if loading else "")

    def _running_elsewhere(self, worker: Worker) -> bool:
        running = self._store.chunks.of_job(self._job.id, (ChunkState.RUNNING,))
        return any(chunk.worker_id != worker.id for chunk in running)

    def _work(self, worker: Worker) -> None:
        """One thread: a chunk at a time until the job is over."""
        try:
            while not (self._stop.is_set() or self._ended.is_set() or worker.stop.is_set()):
                try:
                    outcome = worker.process_next(self._job)
                except StoreUnavailable as error:
                    complain(log, f"{error}; waiting for it")
                    self._ended.wait(TICK_SECONDS)
                    continue
                if outcome is None:
                    self._ended.wait(TICK_SECONDS)
                    continue
                if outcome.status is ChunkStatus.NOT_LOADED:
                    self._not_loaded = outcome.error
                    worker.stop.set()
                self._changed.set()
        except Draining:
            return
        except Exception as error:
            self._failure = error
            worker.stop.set()

    def _end_for_failed_load(self, reason: str) -> None:
        if self._store.telemetry.activity(self._job.id).num_chunks:
            raise LoadFailed(f"{reason}; job {self._job.name} goes on in another process")
        again = f"once that is mended, the same command or `nightdraft resume {self._job.name}` goes on"
        fail_job(self._store, self._job, LoadFailed.code, f"the engine could not be loaded: {reason}; {again}")

    def _summary(self) -> JobSummary:
        return summarise(self._store.jobs.get(self._job.id), self._store.jobs.progress(self._job.id))


def _ready_at(worker: Worker) -> float | None:
    host = worker.hosts.running
    return None if host is None else host.ready_at
