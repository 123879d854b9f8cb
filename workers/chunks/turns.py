"""Which chunks may run beside others in one process."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from workers.errors import GaveUp

_POLL_SECONDS = 0.1


class Company:
    """Lets chunks run side by side, and one under suspicion with nobody beside it. First come, first served."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._line: deque[object] = deque()
        self._inside = 0
        self._alone = False

    @contextmanager
    def enter(self, *, alone: bool, give_up: Callable[[], bool]) -> Iterator[None]:
        """Wait for a place, then run the block in it. Raises `GaveUp` once `give_up()` is true while waiting."""
        self._wait(alone, give_up)
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._alone = False
                self._changed.notify_all()

    def _wait(self, alone: bool, give_up: Callable[[], bool]) -> None:
        ticket = object()
        with self._changed:
            self._line.append(ticket)
            try:
                while not (self._line[0] is ticket and self._has_place(alone)):
                    if give_up():
                        raise GaveUp("other chunks were still running")
                    self._changed.wait(_POLL_SECONDS)
                self._inside += 1
                self._alone = alone
            finally:
                self._line.remove(ticket)
                self._changed.notify_all()

    def _has_place(self, alone: bool) -> bool:
        return self._inside == 0 or not (alone or self._alone)
