"""What an engine that starts is busy with, for those who wait: one phase at a time in a process."""

from __future__ import annotations

import io
import logging
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

ONCE = "once on this machine"

log = logging.getLogger(__name__)
_lock = threading.Lock()
_under_way: list[Phase] = []


class Phase:
    """Something that takes seconds."""

    def __init__(self, text: str) -> None:
        self._text = text
        self.progress = ""
        """How far it is, in a word; empty where nobody knows."""

    def __str__(self) -> str:
        return f"{self._text}: {self.progress}" if self.progress else self._text


@contextmanager
def phase(text: str, *, once: bool = False) -> Iterator[Phase]:
    """While the block runs, `current` names it, the innermost of several. `once`: it is not done again on this machine;
    the log says how long it took."""
    entered = Phase(f"{text} ({ONCE})" if once else text)
    started = time.monotonic()
    if once:
        log.info("%s", entered)
    with _lock:
        _under_way.append(entered)
    try:
        yield entered
    finally:
        with _lock:
            _under_way.remove(entered)
        if once:
            log.info("%s took %.0f s", text, time.monotonic() - started)


def current() -> str | None:
    """What goes on now, and how far it is; None when nothing does."""
    with _lock:
        return str(_under_way[-1]) if _under_way else None


class PercentReader(io.StringIO):
    """Takes what a progress bar of another library prints, and keeps its percentage as the progress of a phase."""

    def __init__(self, phase: Phase) -> None:
        super().__init__()
        self._phase = phase

    def write(self, text: str) -> int:
        if found := re.findall(r"\d+%", text):
            self._phase.progress = found[-1]
        return len(text)
