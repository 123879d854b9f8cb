"""A worker: claims chunks by message, processes them on the process's engine, and tells the store that it is alive."""

from __future__ import annotations

import logging
import os
import socket
import threading
import uuid

from storage.errors import UnknownJob
from storage.records import ChunkMessage
from storage.store import Store
from workers.chunk import ChunkOutcome, process_chunk
from workers.host import EngineFactory, real_engine
from workers.hosts import EngineHosts
from workers.patience import patiently
from workers.pulse import Pulse

logger = logging.getLogger(__name__)


class Draining(Exception):
    """The worker is stopping and takes no more chunks; the message should go to another."""


class Worker:
    """What the task threads of one process share. `stop` makes every running chunk record what finished and let go."""

    def __init__(self, store: Store, *, factory: EngineFactory = real_engine) -> None:
        self.id = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self.store = store
        self.hosts = EngineHosts(factory)
        self.stop = threading.Event()
        self._pulse = Pulse(store, self.hosts, self.id)

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
        if self.stop.is_set():
            raise Draining
        try:
            job = patiently(lambda: self.store.get_job(message.job_id), self.stop.is_set)
        except UnknownJob:
            logger.info("job %s is no longer in the store; its message is dropped", message.job_id)
            return None
        lease_seconds = float(job.spec.get("lease_seconds") or 60.0)
        chunk = patiently(
            lambda: self.store.claim(message.chunk_id, message.epoch, self.id, lease_seconds), self.stop.is_set
        )
        if chunk is None:
            logger.info("chunk %d, epoch %d: taken before, or stale; nothing to do", message.chunk_id, message.epoch)
            return None
        return process_chunk(self.store, self.hosts, job, chunk, worker_id=self.id, stop=self.stop)
