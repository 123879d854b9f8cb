"""Which chunks may run beside others in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from workers.line import Line


class Turns:
    """Many chunks run at once; one that is suspected of crashing the worker runs alone. First come, first served."""

    def __init__(self) -> None:
        self._line = Line()
        self._inside = 0
        self._alone = False

    @contextmanager
    def enter(self, *, alone: bool, give_up: Callable[[], bool]) -> Iterator[None]:
        """Wait for a place, then run the block in it. Raises `GaveUp` once `give_up()` is true while waiting."""
        self._line.wait(lambda: self._take(alone), give_up, "other chunks were still running")
        try:
            yield
        finally:
            with self._line.changing():
                self._inside -= 1
                self._alone = False

    def _take(self, alone: bool) -> bool | None:
        """A place, if there is one: True, or None."""
        if self._inside and (alone or self._alone):
            return None
        self._inside += 1
        self._alone = alone
        return True
