"""Calling a store that may be restarting."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from itertools import count
from typing import TypeVar

from sqlalchemy.exc import InterfaceError, OperationalError

from storage.errors import StoreUnavailable

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

STORE_OUT_OF_REACH = (OperationalError, InterfaceError, StoreUnavailable)
"""What a store raises while its database is down, restarting or locked: worth trying again."""

_PAUSES = (0.1, 0.25, 0.5, 1.0, 2.0)
"""Seconds before each further try; the last one repeats."""


def patiently(call: Callable[[], _T], give_up: Callable[[], bool]) -> _T:
    """Call until the store answers. Raises its last error once `give_up()` is true. The call must be safe to repeat."""
    for attempt in count():
        try:
            return call()
        except STORE_OUT_OF_REACH as error:
            if give_up():
                raise
            logger.warning("the store is out of reach, trying again: %s", error)
            _pause(_PAUSES[min(attempt, len(_PAUSES) - 1)], give_up)
    raise AssertionError("count() does not end")


def _pause(seconds: float, give_up: Callable[[], bool]) -> None:
    sleeper = threading.Event()
    for _ in range(max(1, round(seconds / 0.1))):
        if give_up():
            return
        sleeper.wait(0.1)
