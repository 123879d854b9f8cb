"""Waiting for what another thread or process does, without a sleep of a guessed length."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE = 100.0


def wait_until(condition: Callable[[], bool], what: str = "the condition holds") -> None:
    """Returns once the condition holds; fails after `PATIENCE` seconds with the words "until <what>"."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE:g} s in vain until {what}"
        time.sleep(0.05)
