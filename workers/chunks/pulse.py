"""What a worker tells the store: that it lives and which of its neighbours do not, how busy its engine is, and which
models run in it."""

from __future__ import annotations

import logging
import threading
from dataclasses import asdict
from datetime import UTC, datetime

from storage.errors import StorageError
from storage.processes import this_process
from storage.retry import complain
from storage.store.store import Store
from storage.store.telemetry import EngineSample
from workers.chunks.records import tokens_of
from workers.engine.api.errors import EngineStopped
from workers.errors import EngineFailed
from workers.hosting.host import EngineHost
from workers.hosting.shared import EngineHosts

log = logging.getLogger(__name__)

PULSE_SECONDS = 5.0


class Pulse:
    """Reports from a thread of its own, every few seconds, between `start` and `stop`."""

    def __init__(
        self,
        store: Store,
        hosts: EngineHosts,
        worker_id: str,
        *,
        job_id: str | None = None,
        seconds: float = PULSE_SECONDS,
    ) -> None:
        """`job_id`: the one job that the worker takes chunks of; None: of any."""
        self._store = store
        self._hosts = hosts
        self._worker_id = worker_id
        self._job_id = job_id
        self._process = this_process()
        self._seconds = seconds
        hosts.before_stop = self._read
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Sign the worker off."""
        self._done.set()
        self._thread.join()
        try:
            self._store.telemetry.worker_gone(self._worker_id)
        except StorageError as error:
            log.warning("worker %s could not sign off: %s", self._worker_id, error)

    def _run(self) -> None:
        while True:
            try:
                self._store.telemetry.worker_seen(self._worker_id, self._process, self._job_id)
                self._store.reaper.expire_dead_workers()
                if (host := self._hosts.running) is not None:
                    read_engine(self._store, self._worker_id, host)
            except StorageError as error:
                complain(log, f"worker {self._worker_id} could not report: {error}")
            if self._done.wait(self._seconds):
                return

    def _read(self, host: EngineHost) -> None:
        """The last reading of an engine: what it did since the one before would be nowhere otherwise."""
        try:
            read_engine(self._store, self._worker_id, host)
        except StorageError as error:
            log.warning("worker %s could not record its engine's last counts: %s", self._worker_id, error)


def read_engine(store: Store, worker_id: str, host: EngineHost) -> None:
    """Record the engine's gauges and totals now; nothing when it has ended."""
    with host.reading:
        _read_for(host.job_id, store, worker_id, host)


def record_what_runs(store: Store, worker_id: str, job_id: str, host: EngineHost) -> None:
    """Note that the engine turns to a job, unless it is at it: the models and the speculators that work on it, and a
    reading that ends the job before and one that begins this one, so that each has its own tokens."""
    with host.reading:
        if host.job_id == job_id:
            return
        _record(store, job_id, host)
        if host.job_id is not None:
            _read_for(host.job_id, store, worker_id, host)
        _read_for(job_id, store, worker_id, host)
        host.job_id = job_id


def _read_for(job_id: str | None, store: Store, worker_id: str, host: EngineHost) -> None:
    try:
        now = host.snapshot()
    except (EngineFailed, EngineStopped):
        return
    sample = EngineSample(
        worker_id=worker_id,
        sampled_at=datetime.now(UTC),
        job_id=job_id,
        num_running=now.running,
        num_waiting=now.waiting,
        num_kv_blocks_used=now.kv_used,
        num_kv_blocks=now.kv_blocks,
        tokens=tokens_of(now),
    )
    store.telemetry.write_engine_samples([sample])


def _record(store: Store, job_id: str, host: EngineHost) -> None:
    report = host.engine.report
    speculation = report["speculator"]
    parameters = {key: value for key, value in asdict(host.config).items() if key != "speculation"}
    target = host.config.target
    store.telemetry.record_model(job_id, "target", target, report["content_hash"], parameters=parameters, report=report)
    draft = report.get("draft")
    if draft is not None:
        store.telemetry.record_model(
            job_id, "draft", draft["name"], draft["content_hash"], parameters=speculation, report=draft
        )
    for method in host.config.speculation.methods:
        store.telemetry.record_speculator(job_id, method, speculation["verify"], parameters=speculation)
