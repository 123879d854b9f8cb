"""An acknowledgement that fails makes the worker connect again.

Kombu logs the failure and goes on. On Redis that takes a place from the prefetch window for good; with the last one
gone the worker waits for messages that it never asks for, and a broker that is back makes no difference.
"""

from __future__ import annotations

from typing import Any, NoReturn

from celery.worker.request import Request
from kombu.asynchronous import get_event_loop


class AcknowledgingRequest(Request):  # type: ignore[misc]
    """A Celery request that looks whether its message was acknowledged."""

    def acknowledge(self) -> None:
        super().acknowledge()
        if not self.message.acknowledged:
            _connect_again()

    def reject(self, requeue: bool = False) -> None:
        super().reject(requeue)
        if not self.message.acknowledged:
            _connect_again()


def _connect_again() -> None:
    loop: Any = get_event_loop()
    if loop is not None:
        # The consumer's loop takes it for what it is, a lost connection, and starts over with a new one.
        loop.call_soon(_lose_connection)


def _lose_connection() -> NoReturn:
    raise ConnectionResetError("the broker could not be told that a message is done")
