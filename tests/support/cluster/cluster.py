"""Real workers as processes, a scheduler as a thread, and jobs with a scripted model to put them through."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anyio
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from scheduler.daemon.publisher import Publisher
from scheduler.daemon.service import Scheduler
from scheduler.intake.dataset import inspect
from scheduler.intake.submission import submit
from storage.files.export import export_job
from storage.records import ChunkState, Job
from storage.spec import JobSpec
from storage.store.store import Store
from tests.support.cluster.light_engine import engine_for
from tests.support.records import claim_next
from tests.support.waiting import wait_until
from workers.chunks.chunk import process_chunk
from workers.hosting.shared import EngineHosts

ROOT = Path(__file__).resolve().parents[3]
LEASE = 2.0
RUNNING = (ChunkState.RUNNING,)


class WorkerProcess:
    """A worker in a process of its own; its output goes to a file."""

    def __init__(self, broker_url: str, store_url: str, log: Path, concurrency: int, freeze: str | None) -> None:
        self.log = log
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    str(Path(__file__).with_name("worker_process.py")),
                    broker_url,
                    store_url,
                    str(concurrency),
                    *([freeze] if freeze else []),
                ],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def stopped(self) -> bool:
        """By SIGSTOP."""
        return psutil.Process(self.process.pid).status() == psutil.STATUS_STOPPED

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def output(self) -> str:
        return self.log.read_text(errors="replace")


class Cluster:
    """Workers and a scheduler on one store and one broker. Ends them all when left."""

    def __init__(self, broker_url: str, store_url: str, folder: Path) -> None:
        self.broker_url = broker_url
        self.store_url = store_url
        self.folder = folder
        self.store = Store.open(store_url)
        self.workers: list[WorkerProcess] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self.workers:
            if worker.alive:
                worker.kill()
        self.store.dispose()
        if kind is not None:
            for worker in self.workers:
                print(f"--- {worker.log.name}\n{worker.output()[-8000:]}")

    def start_worker(self, concurrency: int = 2, *, freeze: str | None = None) -> WorkerProcess:
        """`freeze`: the transaction inside which it stops, as `worker_process` says."""
        log = self.folder / f"worker-{len(self.workers)}.log"
        worker = WorkerProcess(self.broker_url, self.store_url, log, concurrency, freeze)
        self.workers.append(worker)
        return worker

    def workers_ready(self, count: int) -> None:
        """Wait until this many workers have reported themselves."""
        wait_until(lambda: len(self.store.telemetry.workers()) >= count, "workers report themselves")

    def submit(
        self, prompts: list[str], *, target: str, name: str = "job", engine: dict[str, Any] | None = None, **spec: Any
    ) -> Job:
        path = self.folder / f"{name}.parquet"
        pq.write_table(pa.table({"prompt": prompts, "number": range(len(prompts))}), path)
        full = JobSpec.parse(
            {
                "name": name,
                "input": {"paths": [str(path)], "prompt_column": "prompt"},
                "engine": {"target": target, "max_batch": 4, **(engine or {})},
                "sampling": {"max_tokens": 24, "temperature": 0.8},
                "chunk_rows": 8,
                "lease_seconds": LEASE,
                **spec,
            }
        )
        return submit(self.store, full, inspect(full.input)).job

    @contextmanager
    def scheduling(self, job: Job, publisher: Publisher | None = None) -> Iterator[None]:
        """A scheduler serves the job while the block runs."""
        scheduler = Scheduler(self.store, publisher or self.broker_url, poll_seconds=0.1, lost_seconds=2.0)
        done = threading.Event()

        async def serve() -> None:
            async with anyio.create_task_group() as group:
                group.start_soon(scheduler.serve)
                while not done.is_set():
                    await anyio.sleep(0.05)
                group.cancel_scope.cancel()

        thread = threading.Thread(target=anyio.run, args=(serve,))
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def recorded(self, job: Job) -> int:
        progress = self.store.jobs.progress(job.id)
        return progress.counts.num_ok + progress.counts.num_errors

    def wait_recorded(self, job: Job, count: int) -> None:
        wait_until(lambda: self.recorded(job) >= count, f"{count} results are recorded")

    def wait_finished(self, job: Job) -> Job:
        wait_until(lambda: self.store.jobs.get(job.id).state.terminal, "the job ends")
        return self.store.jobs.get(job.id)

    def holds_chunk(self, worker: WorkerProcess) -> bool:
        running = [chunk for job in self.store.jobs.newest() for chunk in self.store.chunks.of_job(job.id, RUNNING)]
        return any(f"-{worker.process.pid}-" in str(chunk.worker_id) for chunk in running)

    def undisturbed(self, job: Job) -> pa.Table:
        """The export of the same job when one process runs it without a broker and without trouble."""
        calm = submit(self.store, replace(job.spec, name="calm"), inspect(job.spec.input)).job
        hosts = EngineHosts(engine_for)
        while (chunk := claim_next(self.store, "calm", 60.0, calm.id)) is not None:
            process_chunk(self.store, hosts, calm, chunk, worker_id="calm", stop=threading.Event())
        hosts.close()
        self.store.jobs.finalize_if_done(calm.id)
        return self.export(calm)

    def export(self, job: Job) -> pa.Table:
        """The exported rows, in order."""
        path = self.folder / f"export-{job.name}.parquet"
        export_job(self.store, job.id, str(path), token_ids=True)
        return pq.read_table(path)
