"""The Celery application of the workers, and the function behind `nightdraft worker`."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import warnings
from collections.abc import Mapping
from typing import Any

from celery import Celery
from celery.platforms import SecurityWarning
from celery.signals import after_setup_logger, after_setup_task_logger, worker_shutting_down

from storage.redaction import redact_logs, redacted
from storage.store.store import Store
from storage.wire import broker_settings
from workers import CHUNKS_IN_FLIGHT
from workers.chunks.worker import Worker
from workers.hosting.interface import EngineFactory, real_engine, without_remote_code
from workers.queue.messages import HintConsumer, harden_transports
from workers.queue.redis_window import mend_window
from workers.queue.tasks import register

log = logging.getLogger(__name__)

STOP_SECONDS = 8.0
"""After SIGTERM a worker that is not through by then ends at once; leases and messages come back by themselves."""


def create_app(broker_url: str, overrides: Mapping[str, Any] | None = None) -> Celery:
    """The worker's Celery app: delivery as agreed on the wire, threads pool, nothing that talks to other workers.

    `overrides` are Celery settings put over these, for tests. Raises `storage.wire.UnsupportedBroker`.
    """
    mend_window()
    harden_transports()
    app = Celery("nightdraft", set_as_current=False)
    app.conf.update(broker_settings(broker_url))
    app.conf.update(
        worker_pool="threads",
        # The store knows which workers live; remote control would add queues whose reconnect is known to stall.
        worker_enable_remote_control=False,
        worker_send_task_events=False,
        worker_redirect_stdouts=False,
        worker_consumer=f"{HintConsumer.__module__}:{HintConsumer.__name__}",
        # After a reconnect the claims of running chunks make redelivered messages harmless, so take new ones at once.
        worker_enable_prefetch_count_reduction=False,
    )
    app.conf.update(overrides or {})
    return app


def run_worker(
    broker_url: str,
    store: Store,
    concurrency: int = CHUNKS_IN_FLIGHT,
    *,
    allow_remote_code: bool = False,
    loglevel: str = "INFO",
    factory: EngineFactory = real_engine,
    overrides: Mapping[str, Any] | None = None,
) -> int:
    """Process chunks of a store until SIGTERM or SIGINT; returns the exit code. The store is opened with
    `SERVICE_PATIENCE`, which is less than `STOP_SECONDS`, so that a signal is heard in time.

    On a signal it takes no more chunks, records what finished, releases its leases and returns within `STOP_SECONDS`;
    past that it ends the process. Call it from the main thread.

    allow_remote_code: jobs that ask for it may run code that comes with their model; otherwise they fail here.
    """
    app = create_app(broker_url, overrides)
    if not allow_remote_code:
        factory = without_remote_code(factory)
    with Worker(store, factory=factory) as worker:
        register(app, worker)
        drain = _Drain(worker)
        worker_shutting_down.connect(drain)
        for logging_is_set_up in (after_setup_logger, after_setup_task_logger):
            logging_is_set_up.connect(_redact)
        try:
            with warnings.catch_warnings():
                # Meant for workers that accept pickle; this one takes JSON only, and has no --uid, which it advises.
                warnings.simplefilter("ignore", SecurityWarning)
                controller = _controller(app, concurrency, loglevel)
            log.info("worker %s: broker %s, %d chunks at a time", worker.id, redacted(broker_url), concurrency)
            controller.start()
            return int(controller.exitcode or 0)
        finally:
            worker_shutting_down.disconnect(drain)


def _controller(app: Celery, concurrency: int, loglevel: str) -> Any:
    return app.Worker(
        pool="threads",
        concurrency=concurrency,
        hostname=f"nightdraft-{os.getpid()}@{socket.gethostname()}",
        queues=[app.conf.task_default_queue],
        loglevel=loglevel,
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
        quiet=True,
    )


def _redact(logger: logging.Logger, **signal: Any) -> None:
    redact_logs(logger.handlers)


class _Drain:
    """Receiver of Celery's shutdown signal: tells the chunks to let go, and sees to it that the process ends."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def __call__(self, **signal: Any) -> None:
        # This runs inside a signal handler: everything else is left to a thread.
        self._worker.stop.set()
        threading.Thread(target=self._see_to_it, name="drain", daemon=True).start()

    def _see_to_it(self) -> None:
        log.info("worker %s takes no more chunks and lets go of those in hand", self._worker.id)
        time.sleep(STOP_SECONDS)
        # What keeps it is an engine that loads, or a long step; with no chunk in hand nothing is lost.
        held = self._worker.busy
        log.warning("worker %s ends after %g s with %d chunks in hand", self._worker.id, STOP_SECONDS, held)
        logging.shutdown()
        os._exit(1 if held else 0)
