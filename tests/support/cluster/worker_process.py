"""`nightdraft worker` with an engine that starts at once: `worker_process.py BROKER STORE CONCURRENCY [FREEZE]`.

FREEZE stops the process (SIGSTOP) the first time that it is inside that transaction: "claim" and "heartbeat" between
their last statement and the commit, "copy" while PostgreSQL waits for the next row of a COPY.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import psycopg

from runner.stores import store_when_up
from storage.store.chunks import Chunks
from storage.store.room import writes
from storage.store.store import SERVICE_PATIENCE
from tests.support.cluster.light_engine import engine_for
from workers.queue.app import run_worker

PLACES: dict[str, tuple[Any, str]] = {
    "claim": (Chunks, "claim"),
    "heartbeat": (Chunks, "heartbeat"),
    "copy": (psycopg.Copy, "write_row"),
}


def freeze_inside(place: str) -> None:
    owner, name = PLACES[place]
    real: Callable[..., Any] = getattr(owner, name)
    inner: Callable[..., Any] = getattr(real, "__wrapped__", real)
    """The statement, inside the transaction that the method is."""

    def then_stop(*arguments: Any, **named: Any) -> Any:
        result = inner(*arguments, **named)
        setattr(owner, name, real)
        os.kill(os.getpid(), signal.SIGSTOP)
        return result

    setattr(owner, name, then_stop if inner is real else writes(then_stop))


if __name__ == "__main__":
    broker, store, concurrency, *place = sys.argv[1:]
    for each in place:
        freeze_inside(each)
    with store_when_up(store, patience=SERVICE_PATIENCE) as opened:
        sys.exit(0 if opened is None else run_worker(broker, opened, int(concurrency), factory=engine_for))
