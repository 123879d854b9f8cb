"""Workers of this machine that ended without a word: their chunks need not wait for the leases to run out."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from storage.store import Store
    from storage.telemetry import WorkerInfo

CLOCK_SLACK_SECONDS = 60.0
"""Between the store's clock and this machine's."""


def expire_dead_workers(store: Store) -> int:
    """End the leases of workers whose process on this machine is gone; returns how many leases."""
    host = socket.gethostname()
    expired = 0
    for worker in store.list_workers():
        if worker.hostname == host and not _lives(worker):
            expired += store.expire_leases(worker.worker_id)
            store.worker_gone(worker.worker_id)
    return expired


def _lives(worker: WorkerInfo) -> bool:
    """Whether the worker's process runs; a process that started later only has its number."""
    try:
        started = psutil.Process(worker.pid).create_time()
    except psutil.NoSuchProcess:
        return False
    return bool(started <= worker.started_at.timestamp() + CLOCK_SLACK_SECONDS)
