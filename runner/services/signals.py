"""What Ctrl-C and SIGTERM do to a process that serves."""

from __future__ import annotations

import signal
import threading
from collections import deque
from collections.abc import Callable

from anyio import open_signal_receiver

SIGNALS = (signal.SIGINT, signal.SIGTERM)


async def on_signals(*actions: Callable[[], object]) -> None:
    """Call these, one at each signal, the last one at all that follow; until cancelled. Only the main thread hears
    signals: elsewhere it returns at once."""
    if threading.current_thread() is not threading.main_thread():
        return
    todo = deque(actions)
    with open_signal_receiver(*SIGNALS) as signals:
        async for _ in signals:
            action = todo.popleft() if len(todo) > 1 else todo[0]
            action()
