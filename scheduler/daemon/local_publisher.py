"""Messages that stay in this process: a queue in memory, and the threads that work it off."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from storage.records import ChunkMessage


class LocalPublisher:
    """Hands every message to `process`, oldest first, in one of a few threads of its own: a broker for one process.

    A message dies with the process, so it leaves no mark on its chunk, which others may take meanwhile. `process` must
    not raise.
    """

    lasting = False

    def __init__(self, process: Callable[[ChunkMessage], None], num_threads: int) -> None:
        self._process = process
        self._changed = threading.Condition()
        self._queue: OrderedDict[ChunkMessage, None] = OrderedDict()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"chunks-{number}", daemon=True) for number in range(num_threads)
        ]

    def publish(self, message: ChunkMessage) -> None:
        """Queue it, unless it waits already."""
        with self._changed:
            if not self._closed:
                self._queue[message] = None
                self._changed.notify()
                self._start()

    def waiting(self) -> int:
        with self._changed:
            return len(self._queue)

    def close(self) -> None:
        """Drop what waits, for good; messages in hand are processed to their end. Does not wait for that."""
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.notify_all()

    def join(self) -> None:
        """Close, and return when no message is in hand any more."""
        self.close()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def _start(self) -> None:
        for thread in self._threads:
            if thread.ident is None:
                thread.start()

    def _work(self) -> None:
        while (message := self._next()) is not None:
            self._process(message)

    def _next(self) -> ChunkMessage | None:
        """Waits for a message; None once closed."""
        with self._changed:
            while not (self._queue or self._closed):
                self._changed.wait()
            return None if self._closed else self._queue.popitem(last=False)[0]
