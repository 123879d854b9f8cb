"""A worker: claims chunks, processes them on the process's engine, and tells the store that it is alive."""

from __future__ import annotations

import logging
import os
import socket
import threading
import uuid
from collections.abc import Callable
from dataclasses import replace

from storage.errors import RefusedSpec, UnknownJob
from storage.records import Chunk, ChunkMessage, Job
from storage.retry import patiently
from storage.store.store import Store
from workers.chunks.chunk import ChunkOutcome, ChunkStatus, fail_job, is_suspect, process_chunk
from workers.chunks.pulse import Pulse
from workers.chunks.turns import Turns
from workers.errors import GaveUp, InvalidSpec, LoadFailed
from workers.hosting.interface import EngineFactory, real_engine
from workers.hosting.shared import EngineHosts

log = logging.getLogger(__name__)

LOADS = 3
"""Loads in a row that fail here before the job is ended for it, unless others are at work on it."""
LOAD_PAUSE = 10.0
"""Seconds after a failed load, times the loads that failed: what is in the way may pass, or another worker come."""


class Draining(Exception):
    """The worker is stopping and takes no more chunks; the message should go to another."""


class Worker:
    """What the task threads of one process share. `stop` makes every running chunk record what finished and let go."""

    def __init__(self, store: Store, *, factory: EngineFactory = real_engine, job_id: str | None = None) -> None:
        """`job_id`: the one job that it takes chunks of; None: of any."""
        self.id = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.store = store
        self.hosts = EngineHosts(factory)
        self.stop = threading.Event()
        self.busy = 0
        """Chunks in hand."""
        self._turns = Turns()
        self._counting = threading.Lock()
        self._pulse = Pulse(store, self.hosts, self.id, job_id=job_id)

    def __enter__(self) -> Worker:
        self._pulse.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop.set()
        self._pulse.stop()
        self.hosts.close()

    def process(self, message: ChunkMessage) -> ChunkOutcome | None:
        """Claim the chunk that a message names and process it. None when there is nothing to do: the message is a
        duplicate or late, or its job is gone. Raises `Draining` when the worker is stopping."""
        try:
            job = patiently(lambda: self.store.jobs.get(message.job_id), self.stop.is_set)
        except UnknownJob:
            log.info("job %s is no longer in the store; its message is dropped", message.job_id)
            return None
        except RefusedSpec as error:
            log.error("%s", error)
            self.store.jobs.fail(message.job_id, InvalidSpec.code, str(error))
            return None
        hint = replace(message, job_id=job.id)  # one put in by hand may have the job's name
        outcome = self._take(job, lambda seconds: self.store.chunks.claim(hint, self.id, seconds))
        if outcome is not None and outcome.status is ChunkStatus.NOT_LOADED:
            self._wait_after_failed_load(job, str(outcome.error))
        return outcome

    def process_next(self, job: Job) -> ChunkOutcome | None:
        """Claim the job's oldest chunk that nobody has and process it; None when there is none now.

        Raises `Draining` when the worker is stopping. What a failed load means is up to the caller.
        """
        return self._take(job, lambda seconds: self.store.chunks.claim_next(self.id, seconds, job.id))

    def _take(self, job: Job, claim: Callable[[float], Chunk | None]) -> ChunkOutcome | None:
        """Claim and process, beside other chunks; but a chunk whose rows may kill the process runs alone.

        It is claimed again when its turn has come: while it waits, no crash of others may find it with a lease.
        """
        seconds = job.spec.lease_seconds
        try:
            with self._turns.enter(alone=False, give_up=self.stop.is_set):
                if self.stop.is_set():
                    raise Draining
                chunk = patiently(lambda: claim(seconds), self.stop.is_set)
                if chunk is None:
                    return None
                if not is_suspect(job, chunk):
                    return self._process(job, chunk)
                self.store.chunks.release(chunk.lease)
                # A release raises the epoch, so that this is the message of the chunk as it now waits.
                released = replace(chunk.message, epoch=chunk.epoch + 1)
        except GaveUp as error:
            raise Draining from error
        try:
            with self._turns.enter(alone=True, give_up=self.stop.is_set):
                again = self.store.chunks.claim(released, self.id, seconds)
                return ChunkOutcome(ChunkStatus.LOST) if again is None else self._process(job, again)
        except GaveUp:
            return ChunkOutcome(ChunkStatus.RELEASED)

    def _wait_after_failed_load(self, job: Job, reason: str) -> None:
        """Leave the job to others for a while. Where nobody else is at it either, it is the job's fault in the end."""
        failed = self.hosts.failed_loads
        log.error("worker %s could not load the engine of job %s: %s", self.id, job.name, reason)
        if (
            failed >= LOADS
            and patiently(lambda: self.store.telemetry.activity(job.id), self.stop.is_set).num_chunks == 0
        ):
            fail_job(self.store, job, LoadFailed.code, f"worker {self.id}: {reason}, {failed} times in a row")
        self.stop.wait(LOAD_PAUSE * failed)

    def _process(self, job: Job, chunk: Chunk) -> ChunkOutcome:
        with self._counting:
            self.busy += 1
        try:
            return process_chunk(self.store, self.hosts, job, chunk, worker_id=self.id, stop=self.stop)
        finally:
            with self._counting:
                self.busy -= 1
