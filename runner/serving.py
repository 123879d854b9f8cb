"""The processes that serve a store and a broker: `nightdraft worker` and `nightdraft scheduler`."""

from __future__ import annotations

import logging
import signal
import sys

import anyio

from runner.errors import ExitCode
from runner.stores import open_store, store_url
from runner.tables import note

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def run_worker(store: str, broker: str, concurrency: int) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code."""
    from workers.app import run_worker as serve

    return serve(broker, store_url(store), concurrency)


def run_scheduler(store: str, broker: str) -> int:
    """Serve all jobs until SIGTERM or SIGINT; returns the exit code."""
    from scheduler.service import Scheduler

    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, stream=sys.stderr)

    async def serve(scheduler: Scheduler) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(_cancel_on_signal, group.cancel_scope)
            await group.start(scheduler.serve)
            note("scheduler: serving; Ctrl-C stops it, jobs and leases stay in the store")

    with open_store(store) as opened:
        anyio.run(serve, Scheduler(opened, broker))
    return ExitCode.OK


async def _cancel_on_signal(scope: anyio.CancelScope) -> None:
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            scope.cancel()
            return
