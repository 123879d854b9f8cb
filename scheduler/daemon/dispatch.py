"""Keeping a window of chunks on the broker, and putting back what the broker lost."""

from __future__ import annotations

import logging
from time import monotonic

from scheduler.daemon.publisher import Publisher
from storage.records import Chunk
from storage.store.store import Store

log = logging.getLogger(__name__)


class Dispatcher:
    """Publishes waiting chunks of one job, or of all. Synchronous; used from one thread at a time.

    `window`: chunks that are dispatched and not yet claimed, over all jobs; of a publisher whose messages do not last,
    messages that wait there. `lost_seconds`: how long a message may be neither waiting on the broker nor claimed before
    its chunk is published again.
    """

    def __init__(
        self, store: Store, publisher: Publisher, *, job_id: str | None, window: int, lost_seconds: float
    ) -> None:
        self._store = store
        self._publisher = publisher
        self._job_id = job_id
        self._window = window
        self._lost_seconds = lost_seconds
        self._next_check = monotonic() + lost_seconds / 3

    def step(self) -> bool:
        """Publish what fits into the window; returns whether that was anything. Raises `BrokerUnavailable`."""
        if not self._publisher.lasting:
            return self._publish_unmarked()
        if monotonic() >= self._next_check:
            self.requeue_lost()
            self._next_check = monotonic() + self._lost_seconds / 3
        free = self._window - self._store.chunks.count_dispatched()
        chunks = self._store.chunks.pending(self._job_id, free) if free > 0 else []
        self._publish(chunks)
        return bool(chunks)

    def _publish_unmarked(self) -> bool:
        """The oldest chunks that nobody has claimed, those that wait here already among them: the publisher knows its
        own. What another scheduler dispatched counts as waiting too: nobody may be there to take its message."""
        before = self._publisher.waiting()
        for chunk in self._store.chunks.pending(self._job_id, self._window, or_dispatched=True):
            self._publisher.publish(chunk.message)
        return self._publisher.waiting() > before

    def requeue_lost(self) -> int:
        """Make chunks pending again whose messages the broker no longer has; returns how many.

        Fewer messages waiting than chunks dispatched means that some are gone. Which ones cannot be told, so all that
        are old enough are published again. While no worker takes messages their number does not fall, so nothing piles
        up.
        """
        if self._publisher.waiting() >= self._store.chunks.count_dispatched():
            return 0
        requeued = self._store.chunks.requeue_stale(self._lost_seconds)
        if requeued:
            log.warning(
                "%d chunks were dispatched over %g s ago and not claimed: publishing them again",
                requeued,
                self._lost_seconds,
            )
        return requeued

    def _publish(self, chunks: list[Chunk]) -> None:
        # Publish first, mark then: a crash in between sends a message twice, which is harmless, and never leaves a
        # chunk that looks dispatched but was not.
        sent: list[int] = []
        try:
            for chunk in chunks:
                self._publisher.publish(chunk.message)
                sent.append(chunk.id)
        finally:
            if sent:
                self._store.chunks.mark_dispatched(sent)
