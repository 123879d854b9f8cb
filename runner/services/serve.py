"""The processes that serve a store and a broker: `nightdraft worker` and `nightdraft scheduler`."""

from __future__ import annotations

import logging
import os
import sys
from typing import NoReturn

import anyio

from runner.errors import ExitCode
from runner.output.console import note
from runner.services.signals import on_signals
from runner.stores import store_when_up
from scheduler.errors import BrokerRefused, BrokerUnavailable
from storage.redaction import redact_logs
from storage.store.store import SERVICE_PATIENCE

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def run_worker(store: str, broker: str, concurrency: int, *, allow_remote_code: bool) -> NoReturn:
    """Serve until SIGTERM or SIGINT, and end the process with the exit code. Raises what no waiting mends."""
    from workers.queue.app import run_worker as serve

    require_broker(broker)
    with store_when_up(store, patience=SERVICE_PATIENCE) as opened:
        code = serve(broker, opened, concurrency, allow_remote_code=allow_remote_code) if opened is not None else 0
    _leave(code)


def require_broker(broker: str) -> None:
    """Raise `BrokerRefused` for a user, password or host that is wrong, `UnsupportedBroker` for another scheme. A
    broker that is down is no reason: who serves waits for it."""
    from scheduler.daemon.publisher import CeleryPublisher

    publisher = CeleryPublisher(broker)
    try:
        publisher.waiting()
    except BrokerRefused:
        raise
    except BrokerUnavailable as error:
        note(f"{error}; waiting for it")
    finally:
        publisher.close()


def _leave(code: int) -> NoReturn:
    """End the process now. Everything is recorded and closed by now, and the interpreter's own way out could outlast
    the ten seconds that supervisors grant after SIGTERM: it joins threads that may wait for a broker that is gone, and
    unloads libraries whose threads may still compute."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_scheduler(store: str, broker: str) -> int:
    """Serve all jobs until SIGTERM or SIGINT; returns the exit code."""
    from scheduler.daemon.service import Scheduler

    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, stream=sys.stderr)
    redact_logs(logging.getLogger().handlers)
    # What Alembic tells at that level (its plugins, its dialect) is for those who write migrations.
    logging.getLogger("alembic").setLevel(logging.WARNING)

    async def serve(scheduler: Scheduler) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(on_signals, group.cancel_scope.cancel)
            await group.start(scheduler.serve)
            note("scheduler: serving; Ctrl-C stops it, jobs and leases stay in the store")

    require_broker(broker)
    with store_when_up(store, patience=SERVICE_PATIENCE) as opened:
        if opened is not None:
            anyio.run(serve, Scheduler(opened, broker))
    return ExitCode.OK
