"""A worker: claims chunks, processes them on the process's engine, and tells the store that it is alive."""

from __future__ import annotations

import logging
import os
import socket
import threading
import uuid
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
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def start(self) -> None:
        """Report to the store from now on."""
        self._pulse.start()

    def close(self) -> None:
        """Sign off, and stop the engine. Nobody may be in `process` any more."""
        self.stop.set()
        self._pulse.stop()
        self.hosts.close()

    def process(self, message: ChunkMessage) -> ChunkOutcome | None:
        """Claim the chunk that a message names and process it, beside other chunks. None when there is nothing to do:
        the message is a duplicate or late, or its job is gone. Raises `Draining` when the worker is stopping."""
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
        seconds = job.spec.lease_seconds
        try:
            with self._turns.enter(alone=False, give_up=self.stop.is_set):
                if self.stop.is_set():
                    raise Draining
                chunk = patiently(lambda: self.store.chunks.claim(hint, self.id, seconds), self.stop.is_set)
                if chunk is None:
                    return None
                if not is_suspect(job, chunk):
                    return self._process(job, chunk)
                self.store.chunks.release(chunk.lease)
        except GaveUp as error:
            raise Draining from error
        # A release raises the epoch, so that this is the message of the chunk as it now waits.
        return self._process_alone(job, replace(chunk.message, epoch=chunk.epoch + 1), seconds)

    def _process_alone(self, job: Job, message: ChunkMessage, lease_seconds: float) -> ChunkOutcome:
        """Process a chunk whose rows may kill the process with no other beside it.

        It is claimed only when its turn has come: while it waits, no crash of others may find it with a lease.
        """
        try:
            with self._turns.enter(alone=True, give_up=self.stop.is_set):
                chunk = self.store.chunks.claim(message, self.id, lease_seconds)
                return ChunkOutcome(ChunkStatus.LOST) if chunk is None else self._process(job, chunk)
        except GaveUp:
            return ChunkOutcome(ChunkStatus.RELEASED)

    def after_failed_load(self, job_id: str, reason: str | None) -> None:
        """Leave the job to others for a while. Where nobody else is at it either, it is the job's fault in the end."""
        failed = self.hosts.failed_loads
        job = patiently(lambda: self.store.jobs.get(job_id), self.stop.is_set)
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
