"""Opening the store that a command names."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

from storage.errors import StoreUnavailable
from storage.retry import patiently
from storage.store.store import Store
from storage.store.telemetry import ALIVE_SECONDS, WorkerInfo


def store_url(value: str) -> str:
    """A database URL as it is; a plain file name means an SQLite file."""
    return value if "://" in value else f"sqlite:///{Path(value).expanduser()}"


def open_store(value: str, *, patience: float = 60.0, create: bool = True) -> Store:
    """The store, to be closed by `with`. Raises what `Store.open` raises.

    `create=False` is for commands that only look, or need a job to be there: nothing is set up at a mistyped place.
    """
    return Store.open(store_url(value), patience=patience, create=create)


@contextmanager
def store_when_up(value: str, *, patience: float) -> Iterator[Store | None]:
    """`open_store` for a service: while the database is down, starting up or full it waits, as one that runs would;
    None when SIGTERM or SIGINT ends the wait. What no waiting mends is raised at once, as by `open_store`."""
    stop = threading.Event()
    with _set_on_signal(stop):
        try:
            store = patiently(lambda: open_store(value, patience=patience), stop.is_set)
        except StoreUnavailable:
            if not stop.is_set():
                raise
            store = None
    if store is None:
        yield None
        return
    with store:
        yield store


@contextmanager
def _set_on_signal(stop: threading.Event) -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda *_: stop.set()) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def alive_workers(store: Store) -> list[WorkerInfo]:
    """Workers seen lately, in worker processes and in-process runs alike."""
    since = datetime.now(UTC) - timedelta(seconds=ALIVE_SECONDS)
    return [worker for worker in store.telemetry.workers() if worker.last_seen >= since]
