"""Keeps a chunk's lease alive while it is processed, and hears whether the job is being cancelled."""

from __future__ import annotations

import logging
import threading
import time

from storage.errors import StorageError, StoreUnavailable
from storage.records import Lease
from storage.retry import complain
from storage.store.store import Store

log = logging.getLogger(__name__)

_BEATS_PER_LEASE = 3
_LONGEST_PAUSE = 5.0
"""Seconds between two beats at most, so that a cancelled job stops soon even under long leases."""


class LeaseKeeper:
    """Extends the lease of a claimed chunk from a thread of its own, as long as the block runs.

    A store that cannot be reached is tried again until the lease has run out by this process's own clock; then, or when
    the store says that the epoch is no longer current, the lease is lost for good.
    """

    def __init__(self, store: Store, lease: Lease, lease_seconds: float) -> None:
        self._store = store
        self._lease = lease
        self._lease_seconds = lease_seconds
        self._pause = min(lease_seconds / _BEATS_PER_LEASE, _LONGEST_PAUSE)
        self._lost = threading.Event()
        self._cancelled = threading.Event()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"lease-{lease.chunk_id}", daemon=True)

    def __enter__(self) -> LeaseKeeper:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def lost(self) -> bool:
        """The chunk belongs to somebody else, or to nobody: nothing of it may be written any more."""
        return self._lost.is_set()

    @property
    def cancelled(self) -> bool:
        """The job is being cancelled: record what is finished and release the chunk."""
        return self._cancelled.is_set()

    def _run(self) -> None:
        expires = time.monotonic() + self._lease_seconds
        while not self._done.wait(self._pause):
            started = time.monotonic()
            if self._beat():
                expires = started + self._lease_seconds
            elif time.monotonic() >= expires:
                log.warning("chunk %d: the store was out of reach for a whole lease", self._lease.chunk_id)
                self._lost.set()
            if self.lost:
                return

    def _beat(self) -> bool:
        """One heartbeat; False when the store could not be reached."""
        try:
            beat = self._store.chunks.heartbeat(self._lease, self._lease_seconds)
        except StoreUnavailable as error:
            complain(log, f"chunk {self._lease.chunk_id}: heartbeat failed, trying again: {error}")
            return False
        except StorageError as error:
            complain(log, f"chunk {self._lease.chunk_id}: the lease is lost: {error}")
            self._lost.set()
            return False
        if not beat.alive:
            self._lost.set()
        if beat.cancel_requested:
            self._cancelled.set()
        return True
