"""Ctrl-C and SIGTERM: the first drains, the second stops."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

from runner.errors import ExitCode

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SHOW_CURSOR = "\x1b[?25h"
"""The live display hides it."""


class Interrupts:
    """Sets `stop` on the first signal; the second ends the process at once (the store loses nothing by that)."""

    def __init__(self, announce: Callable[[str], None]) -> None:
        self.stop = threading.Event()
        self._announce = announce
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.stop.is_set():
            if sys.stderr.isatty():
                sys.stderr.write(SHOW_CURSOR)
            self._announce("stopped")
            os._exit(ExitCode.INTERRUPTED)
        self.stop.set()
        self._announce("recording what is finished; press Ctrl-C again to stop at once")
