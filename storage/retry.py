"""Trying again: pauses that grow, and complaints that are heard without filling a log."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from storage.errors import StoreUnavailable

log = logging.getLogger(__name__)

T = TypeVar("T")

QUIET_SECONDS = 15.0
"""A complaint that was logged is not logged again for so long: an outage has many threads that all say the same."""

LOOK_SECONDS = 0.1
"""Between two looks at whether a wait is still wanted."""


@dataclass(slots=True)
class Backoff:
    """Doubling waits, in seconds, from `first` up to `longest`."""

    first: float = 0.5
    longest: float = 15.0
    _next: float = field(default=0.0, init=False)

    def next(self) -> float:
        wait = self._next or self.first
        self._next = min(2 * wait, self.longest)
        return wait


def patiently(call: Callable[[], T], give_up: Callable[[], bool]) -> T:
    """Call until the store answers. Raises its last `StoreUnavailable` once `give_up()` is true.

    The call must be safe to repeat. `give_up` is asked only when the store has failed.
    """
    backoff = Backoff(first=0.1, longest=2.0)
    while True:
        try:
            return call()
        except StoreUnavailable as error:
            if give_up():
                raise
            complain(log, f"{error}; trying again")
        _wait(backoff.next(), give_up)


def _wait(seconds: float, give_up: Callable[[], bool]) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and not give_up():
        time.sleep(LOOK_SECONDS)


def complain(logger: logging.Logger, text: str) -> None:
    """Log a warning, unless this process logged the same one within `QUIET_SECONDS`."""
    now = time.monotonic()
    with _lock:
        loud = now - _said.get(text, -QUIET_SECONDS) >= QUIET_SECONDS
        if loud:
            for old in [said for said, at in _said.items() if now - at >= QUIET_SECONDS]:
                del _said[old]
            _said[text] = now
    logger.log(logging.WARNING if loud else logging.DEBUG, "%s", text)


_lock = threading.Lock()
_said: dict[str, float] = {}
