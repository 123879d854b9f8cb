"""Threads that wait for something that not all can have at once, first come, first served."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from storage.retry import LOOK_SECONDS
from workers.errors import GaveUp

T = TypeVar("T")


class Line:
    """A line of waiting threads. Only the first one tries; those behind it wait even when there is something for them,
    so that nobody starves."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def wait(self, take: Callable[[], T | None], give_up: Callable[[], bool], otherwise: str) -> T:
        """What `take` gives, once this thread is first in line and `take` gives anything but None.

        `take` is called under the line's lock. Raises `GaveUp(otherwise)` once `give_up()` is true while waiting.
        """
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            try:
                while self._waiting[0] is not ticket or (taken := take()) is None:
                    if give_up():
                        raise GaveUp(otherwise)
                    self._changed.wait(LOOK_SECONDS)
                return taken
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Under the line's lock, change what `take` looks at; those who wait look again afterwards."""
        with self._changed:
            try:
                yield
            finally:
                self._changed.notify_all()
