"""The whole job in this process: the scheduler with a publisher in memory, the worker's own code below it."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio
from anyio import CancelScope, create_task_group, sleep, to_thread

from runner.errors import ExitCode
from runner.output.console import note
from runner.output.progress import Display, Follower
from runner.output.summary import JobSummary, summarise
from runner.services.signals import on_signals
from scheduler.daemon.local_publisher import LocalPublisher
from scheduler.daemon.service import Scheduler
from scheduler.finishing import finish_if_done
from storage.errors import StoreUnavailable
from storage.records import ChunkMessage, ChunkState, Job
from storage.retry import complain
from workers import CHUNKS_IN_FLIGHT
from workers.chunks.chunk import ChunkStatus, fail_job
from workers.chunks.worker import Draining, Worker
from workers.engine.api import phases
from workers.engine.api.errors import EngineStopped
from workers.errors import EngineFailed, LoadFailed

if TYPE_CHECKING:
    from storage.store.store import Store

log = logging.getLogger(__name__)

TICK_SECONDS = 0.2
OUTAGE_SECONDS = 60.0
"""A run whose store stays away, or full, for longer ends; the same command goes on from what is recorded."""
SHOW_CURSOR = "\x1b[?25h"
"""The live display hides it."""


@dataclass(frozen=True, slots=True)
class LocalOutcome:
    job: Job
    tokens_per_second: float | None
    """Output tokens of this run per second since the model was loaded; None when nothing was generated."""


class LocalRun:
    """Processes the chunks of one job in threads until the job ends or `stop` is set, by Ctrl-C too."""

    def __init__(self, store: Store, job: Job, stop: threading.Event) -> None:
        self._store = store
        self._job = job
        self._stop = stop
        self._worker = Worker(store, job_id=job.id)
        self._publisher = LocalPublisher(self._process, CHUNKS_IN_FLIGHT)
        self._scheduler = Scheduler(store, self._publisher, window=2 * CHUNKS_IN_FLIGHT, poll_seconds=TICK_SECONDS)
        self._failure: Exception | None = None
        self._not_loaded: str | None = None
        """Why the engine could not be loaded."""
        self._emitted: int | None = None
        """Tokens that the engine has emitted, those of unfinished rows among them."""

    def run(self, display: Display) -> LocalOutcome:
        """Returns when the job is terminal, or everything in flight is recorded after `stop`. Call it once.

        Raises what a chunk raised unexpectedly; what had finished is recorded, the rest is free for the next run. An
        engine that cannot be loaded ends the job; where another process works on it, `LoadFailed` is raised instead.
        """
        follower = Follower(self._summary, display)
        job = finish_if_done(self._store, self._job)
        start, _ = follower.refresh()
        if job.state.terminal:
            return LocalOutcome(job, None)
        seconds = anyio.run(self._serve, follower)
        if self._not_loaded is not None:
            self._end_for_failed_load(self._not_loaded)
        if isinstance(self._failure, StoreUnavailable):
            raise self._failure
        end, _ = follower.refresh(tokens=self._emitted)
        if self._failure is not None:
            raise self._failure
        tokens = end.counts.num_output_tokens - start.counts.num_output_tokens
        return LocalOutcome(self._store.jobs.get(job.id), tokens / seconds if seconds and tokens > 0 else None)

    async def _serve(self, follower: Follower) -> float | None:
        """Have the job served until it ends or the worker stops; returns the seconds since the model was ready."""
        async with create_task_group() as beside:
            beside.start_soon(on_signals, self._drain, _stop_at_once)
            self._worker.start()
            with CancelScope() as serving:
                beside.start_soon(self._watch, follower, serving)
                try:
                    await self._scheduler.run(self._job.id, outage_seconds=OUTAGE_SECONDS)
                except Exception as error:
                    self._fail(error)
            await to_thread.run_sync(self._publisher.join)
            seconds = None if self._ready_at is None else time.monotonic() - self._ready_at
            await to_thread.run_sync(self._worker.close)
            beside.cancel_scope.cancel()
        return seconds

    async def _watch(self, follower: Follower, serving: CancelScope) -> None:
        """Show where the job is, and end serving it once the worker is to stop."""
        look_at = 0.0
        loading = True
        while True:
            if self._stop.is_set():
                self._worker.stop.set()
            if self._worker.stop.is_set():
                serving.cancel()
            if loading and self._ready_at is not None:
                loading = False
                follower.restart()
            if time.monotonic() >= look_at:
                try:
                    look_at = time.monotonic() + await to_thread.run_sync(self._look, follower)
                except StoreUnavailable as error:
                    complain(log, f"{error}; trying again")
                except Exception as error:
                    self._fail(error)
            await sleep(TICK_SECONDS)

    def _process(self, message: ChunkMessage) -> None:
        """One chunk, in a thread of the publisher."""
        try:
            outcome = self._worker.process(message)
        except Draining:
            return
        except StoreUnavailable as error:
            complain(log, f"{error}; trying again")
            return
        except Exception as error:
            self._fail(error)
        else:
            if outcome is not None and outcome.status is ChunkStatus.NOT_LOADED:
                self._not_loaded = outcome.error
                self._worker.stop.set()
        self._scheduler.wake()

    def _drain(self) -> None:
        self._stop.set()
        note("recording what is finished; press Ctrl-C again to stop at once")

    def _fail(self, error: Exception) -> None:
        """The run ends with this error, the first of several."""
        self._failure = self._failure or error
        self._worker.stop.set()

    def _look(self, follower: Follower) -> float:
        """Show where the job is; returns the seconds until the next look."""
        host = self._worker.hosts.running
        if host is not None:
            with suppress(EngineFailed, EngineStopped):
                self._emitted = host.snapshot().emitted
        return follower.refresh(self._note(), self._emitted)[1]

    def _note(self) -> str:
        if self._stop.is_set():
            return "draining"
        if self._worker.busy == 0:
            return "waiting for rows that another process holds" if self._running_elsewhere() else ""
        return phases.current() or ("loading the model" if self._ready_at is None else "")

    def _running_elsewhere(self) -> bool:
        if not self._scheduler.looked:
            return False
        running = self._store.chunks.of_job(self._job.id, (ChunkState.RUNNING,))
        return any(chunk.worker_id != self._worker.id for chunk in running)

    @property
    def _ready_at(self) -> float | None:
        host = self._worker.hosts.running
        return None if host is None else host.ready_at

    def _end_for_failed_load(self, reason: str) -> None:
        if self._store.telemetry.activity(self._job.id).num_chunks:
            raise LoadFailed(f"{reason}; job {self._job.name} goes on in another process")
        again = f"once that is mended, the same command or `nightdraft resume {self._job.name}` goes on"
        fail_job(self._store, self._job, LoadFailed.code, f"the engine could not be loaded: {reason}; {again}")

    def _summary(self) -> JobSummary:
        return summarise(self._store.jobs.get(self._job.id), self._store.jobs.progress(self._job.id))


def _stop_at_once() -> None:
    """End the process; the store loses nothing by that."""
    if sys.stderr.isatty():
        sys.stderr.write(SHOW_CURSOR)
    note("stopped")
    os._exit(ExitCode.INTERRUPTED)
