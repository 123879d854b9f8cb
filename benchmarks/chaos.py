"""Every row once, and nobody needs a person: workers, schedulers and runs are killed at random times, among sessions
that freeze, phases in which the database is read-only, messages that are none, and disks that are full.

Redis and RabbitMQ with PostgreSQL (`NIGHTDRAFT_TEST_REDIS`, ..., as in the tests), and a local run on SQLite. What was
killed is started again, as a supervisor would; whatever ends by itself, and a job that does not complete, counts as an
intervention. Full disks need root, for small file systems of their own. The engine answers with a hash of the prompt.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self
from urllib.parse import quote

import kombu
import psutil
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
from celery import Celery
from psycopg import sql

from scheduler.intake.dataset import inspect
from scheduler.intake.submission import submit
from storage.errors import StoreUnavailable
from storage.records import ChunkState, Job
from storage.retry import patiently
from storage.spec import JobSpec
from storage.store.store import Store
from storage.wire import TASK_NAME, broker_settings
from tests.support.cluster.light_engine import engine_for
from tests.support.records import claim_next
from workers.chunks.chunk import process_chunk
from workers.hosting.shared import EngineHosts

ROOT = Path(__file__).resolve().parents[1]
POSTGRES = os.environ.get("NIGHTDRAFT_TEST_POSTGRES", "postgresql://postgres@127.0.0.1:5432/test")
BROKERS = {
    "redis": os.environ.get("NIGHTDRAFT_TEST_REDIS", "redis://127.0.0.1:6379") + "/0",
    "rabbitmq": os.environ.get("NIGHTDRAFT_TEST_RABBITMQ", "amqp://guest:guest@127.0.0.1:5672//"),
}
DEPLOYMENTS = (*BROKERS, "sqlite")
LIMITS = "-c idle_in_transaction_session_timeout=2s -c lock_timeout=1s"
"""As short as the leases of these jobs."""
LEASE_SECONDS = 4.0
MAX_ATTEMPTS = 1000
"""A kill here is no row's fault, however often it meets the same one."""
ROWS = 160
END_SECONDS = 300.0
"""After the last kill everything has to complete by itself within this time."""
PLACES = ("claim", "heartbeat", "copy")
MALFORMED = (
    '"a string"', '"args"', "5", "null", "[5, 6, 7]", "[[], {}, {}]", "[" * 9000, "\x00",
    '[[], {"job_id": "last", "chunk_id": -1, "epoch": true}, {}]', json.dumps([[], {"job_id": "x" * 10**6}, {}]),
)  # fmt: skip


@dataclass(slots=True)
class Report:
    """What was done to one deployment, and what became of its rows."""

    name: str
    kills: Counter[str] = field(default_factory=Counter)
    mixed_in: Counter[str] = field(default_factory=Counter)
    rows: int = 0
    duplicates: int = 0
    missing: int = 0
    wrong: int = 0
    interventions: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        def listed(counts: Counter[str]) -> str:
            return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))

        line = (
            f"  {self.name:<9} {self.kills.total()} kills ({listed(self.kills)}) mixed with {listed(self.mixed_in)}: "
            f"{self.rows} rows, duplicates {self.duplicates}, missing {self.missing}, errors or other answers "
            f"{self.wrong}, interventions {len(self.interventions)}"
        )
        return "\n".join([line, *(f"    {what}" for what in self.interventions)])

    @property
    def good(self) -> bool:
        return not (self.duplicates or self.missing or self.wrong or self.interventions)


def run(kills: int, seed: int, names: tuple[str, ...] = DEPLOYMENTS) -> bool:
    """Run so many kills in all, and print a line for each deployment; returns whether every row came out once."""
    print(f"\nchaos: {kills} kills, seed {seed}", flush=True)
    parts = {"sqlite": kills // 5} if len(names) > 1 and "sqlite" in names else {}
    services = [name for name in names if name not in parts]
    left = kills - sum(parts.values())
    parts |= {name: left // len(services) + (place < left % len(services)) for place, name in enumerate(services)}
    reports = []
    for name in names:
        with tempfile.TemporaryDirectory(prefix="nightdraft-chaos-") as folder:
            chaos = _Local if name == "sqlite" else _Services
            with chaos(name, Path(folder), random.Random(f"{seed} {name}")) as deployment:
                deployment.go_through(parts[name])
        print(deployment.report, flush=True)
        reports.append(deployment.report)
    total = sum((report.kills for report in reports), Counter())
    print(
        f"  all: {total.total()} kills, {sum(r.rows for r in reports)} rows, duplicates"
        f" {sum(r.duplicates for r in reports)}, missing {sum(r.missing for r in reports)}, errors or other answers"
        f" {sum(r.wrong for r in reports)}, interventions {sum(len(r.interventions) for r in reports)}"
    )
    return all(report.good for report in reports)


class _Disk:
    """A file system of its own, which can be filled to the last byte."""

    def __init__(self, folder: Path, megabytes: int, owner: str) -> None:
        self.folder = folder
        options = f"size={megabytes}m,mode=0700,uid={owner},gid={owner}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        self.mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0

    def fill(self) -> None:
        with suppress(OSError), (self.folder / "filler").open("wb", buffering=0) as filler:
            while filler.write(bytes(4096)):
                pass

    def make_room(self) -> None:
        (self.folder / "filler").unlink(missing_ok=True)

    def close(self) -> None:
        if self.mounted:
            subprocess.run(["umount", "--lazy", str(self.folder)], check=False)


class _Deployment:
    """Processes, a store, jobs, and somebody who throws the dice."""

    def __init__(self, name: str, folder: Path, dice: random.Random) -> None:
        self.report = Report(name)
        self.folder = folder
        self.dice = dice
        self.jobs: list[Job] = []
        self._logs = 0

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        self._logs += 1
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with (self.folder / f"{self._logs:04}.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, *command], cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
            )

    def log_of_last_exit(self) -> str:
        logs = sorted(self.folder.glob("*.log"), key=lambda path: path.stat().st_mtime)
        return " | ".join(line for log in logs[-3:] for line in log.read_text(errors="replace").splitlines()[-3:])

    def check(self, store: Store, expected: list[str] | None) -> None:
        """Count what became of every row, from the records themselves."""
        for job in self.jobs:
            job = store.jobs.get(job.id)
            if job.state != "completed":
                self.report.interventions.append(f"{job.name} is {job.state}: {job.error_message}")
            found = list(store.results.iterate(job.id))
            texts = {result.row_index: result.output_text for result in found}
            self.report.rows += job.num_rows
            self.report.duplicates += len(found) - len(texts)
            self.report.missing += job.num_rows - len(texts)
            counted = store.jobs.progress(job.id).counts.num_ok
            self.report.wrong += abs(counted - len(found))
            self.report.wrong += sum(result.error_code is not None for result in found)
            if expected is not None:
                self.report.wrong += sum(text != expected[row] for row, text in texts.items())


class _Services(_Deployment):
    """Three workers and two schedulers on PostgreSQL and a broker."""

    def __init__(self, name: str, folder: Path, dice: random.Random) -> None:
        super().__init__(name, folder, dice)
        mark = uuid.uuid4().hex[:8]
        self.queue = f"chaos-{mark}"
        self.database = f"nightdraft_chaos_{mark}"
        self.broker = f"{BROKERS[name]}?queue={self.queue}"
        self.workers: list[subprocess.Popen[bytes]] = []
        self.schedulers: list[subprocess.Popen[bytes]] = []
        self.frozen: dict[int, float] = {}
        """When a stopped process may go on, by its id."""
        self.stopped_by_hand: set[int] = set()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self.admin = self._stack.enter_context(psycopg.connect(POSTGRES, autocommit=True))
        # PostgreSQL's own user has to reach it.
        shelf = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="nightdraft-chaos-pg-")))
        shelf.chmod(0o755)
        self.disk = _Disk(shelf / "disk", 160, "postgres")
        self._stack.callback(self._clean_up)
        self._create()
        head, _, query = POSTGRES.partition("?")
        options = f"options={quote(LIMITS)}"
        self.url = f"{head.rsplit('/', 1)[0]}/{self.database}?{query}{'&' if query else ''}{options}"
        self.store = Store.open(self.url, patience=5.0)
        self._stack.callback(self.store.dispose)
        self._stack.callback(self._end_processes)
        self._declare()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def go_through(self, kills: int) -> None:
        prompts = [f"Tell me about number {row}." for row in range(ROWS)]
        calm = self._submit(prompts, "calm", "light:0")
        expected = self._undisturbed(calm)
        for _ in range(3):
            self.workers.append(self._start_worker())
        for _ in range(2):
            self.schedulers.append(self._start_scheduler())
        while self.report.kills.total() < kills:
            if sum(not self._ended(job) for job in self.jobs) < 2:
                self.jobs.append(self._submit(prompts, f"job-{len(self.jobs)}", "light:150"))
            self._supervise()
            self._strike()
            time.sleep(self.dice.uniform(0.1, 0.8))
        deadline = time.monotonic() + END_SECONDS
        while not all(self._ended(job) for job in self.jobs) and time.monotonic() < deadline:
            self._supervise()
            time.sleep(0.5)
        self.check(self.store, expected)

    def _strike(self) -> None:
        blows: list[tuple[Callable[[], None], int]] = [
            (self._kill_worker, 10),
            (self._kill_scheduler, 4),
            (self._freeze, 3),
            (self._read_only, 1),
            (self._malformed, 3),
        ]
        if self.has_own_disk:
            blows.append((self._full_disk, 1))
        self.dice.choices([blow for blow, _ in blows], [weight for _, weight in blows])[0]()

    def _kill_worker(self) -> None:
        """The next one freezes inside a transaction now and then."""
        victim = self.dice.choice(self.workers)
        busy = self._is_busy(victim)
        if not busy and self.dice.random() < 0.8:
            return
        self._kill(victim)
        self.report.kills["busy worker" if busy else "worker"] += 1
        self.workers.remove(victim)
        place = self.dice.choice(PLACES) if self.dice.random() < 0.25 else None
        self.workers.append(self._start_worker(place))

    def _is_busy(self, worker: subprocess.Popen[bytes]) -> bool:
        running = [chunk for job in self.jobs for chunk in self.store.chunks.of_job(job.id, (ChunkState.RUNNING,))]
        return any(f"-{worker.pid}-" in str(chunk.worker_id) for chunk in running)

    def _kill_scheduler(self) -> None:
        victim = self.dice.choice(self.schedulers)
        self._kill(victim)
        self.report.kills["scheduler"] += 1
        self.schedulers.remove(victim)
        self.schedulers.append(self._start_scheduler())

    def _freeze(self) -> None:
        victim = self.dice.choice([*self.workers, *self.schedulers])
        victim.send_signal(signal.SIGSTOP)
        self.stopped_by_hand.add(victim.pid)
        self.report.mixed_in["frozen processes"] += 1

    def _read_only(self) -> None:
        self.report.mixed_in["read-only phases"] += 1
        self._alter("SET default_transaction_read_only = on")
        time.sleep(self.dice.uniform(0.5, 5.0))
        self._alter("RESET default_transaction_read_only")

    def _full_disk(self) -> None:
        self.report.mixed_in["full disks"] += 1
        self.disk.fill()
        time.sleep(self.dice.uniform(0.5, 5.0))
        self.disk.make_room()

    def _malformed(self) -> None:
        with kombu.Connection(BROKERS[self.report.name]) as connection, connection.channel() as channel:
            for _ in range(5):
                headers = {"task": self.dice.choice([TASK_NAME, "evil", None, ["x"]]), "id": "x"}
                message = channel.prepare_message(
                    self.dice.choice(MALFORMED).encode(),
                    headers=headers,
                    content_type=self.dice.choice(["application/json", "text/plain", "application/x-python-serialize"]),
                    content_encoding=self.dice.choice(["utf-8", "binary", "no-such"]),
                    properties={"delivery_mode": 2},
                )
                channel.basic_publish(message, exchange=self.queue, routing_key=self.queue)
        self.report.mixed_in["malformed messages"] += 5

    def _supervise(self) -> None:
        """Let frozen processes go on after a while, and note those that ended by themselves."""
        now = time.monotonic()
        for group, start in ((self.workers, self._start_worker), (self.schedulers, self._start_scheduler)):
            for process in list(group):
                if process.poll() is not None:
                    self.report.interventions.append(
                        f"a process ended by itself with {process.returncode}: {self.log_of_last_exit()}"
                    )
                    group.remove(process)
                    group.append(start())
                elif psutil.Process(process.pid).status() == psutil.STATUS_STOPPED:
                    self._let_go_on(process, now)

    def _let_go_on(self, process: subprocess.Popen[bytes], now: float) -> None:
        if process.pid not in self.frozen:
            self.frozen[process.pid] = now + self.dice.uniform(1.0, 8.0)
            if process.pid not in self.stopped_by_hand:
                self.report.mixed_in["sessions frozen inside a transaction"] += 1
        elif now > self.frozen[process.pid]:
            del self.frozen[process.pid]
            self.stopped_by_hand.discard(process.pid)
            process.send_signal(signal.SIGCONT)

    def _ended(self, job: Job) -> bool:
        return patiently(lambda: self.store.jobs.get(job.id), lambda: False).state.terminal

    def _submit(self, prompts: list[str], name: str, target: str) -> Job:
        path = self.folder / "prompts.parquet"
        if not path.exists():
            pq.write_table(pa.table({"prompt": prompts}), path)
        spec = JobSpec.parse(
            {
                "name": name,
                "input": {"paths": [str(path)], "prompt_column": "prompt"},
                "engine": {"target": target, "max_batch": 4},
                "sampling": {"max_tokens": 24, "temperature": 0.8},
                "chunk_rows": 8,
                "lease_seconds": LEASE_SECONDS,
                "max_attempts": MAX_ATTEMPTS,
            }
        )
        return patiently(lambda: submit(self.store, spec, inspect(spec.input)).job, lambda: False)

    def _undisturbed(self, job: Job) -> list[str]:
        hosts = EngineHosts(engine_for)
        while (chunk := claim_next(self.store, "calm", 60.0, job.id)) is not None:
            process_chunk(self.store, hosts, job, chunk, worker_id="calm", stop=threading.Event())
        hosts.close()
        self.store.jobs.finalize_if_done(job.id)
        return [str(result.output_text) for result in self.store.results.iterate(job.id)]

    def _start_worker(self, freeze: str | None = None) -> subprocess.Popen[bytes]:
        script = str(ROOT / "tests/support/cluster/worker_process.py")
        return self.start(script, self.broker, self.url, "2", *([freeze] if freeze else []))

    def _start_scheduler(self) -> subprocess.Popen[bytes]:
        main = ("-c", "from runner.cli import main; main()")
        return self.start(*main, "scheduler", "--store", self.url, "--broker", self.broker)

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        self.frozen.pop(process.pid, None)
        process.kill()
        process.wait()

    def _create(self) -> None:
        name = sql.Identifier(self.database)
        place: sql.Composable = sql.SQL("")
        try:
            if self.disk.mounted:
                self.admin.execute(sql.SQL("CREATE TABLESPACE {} LOCATION {}").format(name, str(self.disk.folder)))
                place = sql.SQL(" TABLESPACE {}").format(name)
        except psycopg.Error as error:
            print(f"  full disks are left out: {error}")
        self.has_own_disk = place != sql.SQL("")
        self.admin.execute(sql.SQL("CREATE DATABASE {}{}").format(name, place))

    def _alter(self, change: str) -> None:
        database = sql.Identifier(self.database)
        self.admin.execute(sql.SQL("ALTER DATABASE {} {}").format(database, sql.SQL(change)))
        self.admin.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (self.database,)
        )

    def _declare(self) -> None:
        """The queue, as workers do: malformed messages may be there first."""
        app = Celery("chaos", set_as_current=False)
        app.conf.update(broker_settings(self.broker))
        with app.connection_for_write() as connection, connection.channel() as channel:
            app.amqp.queues[self.queue].bind(channel).declare()

    def _end_processes(self) -> None:
        for process in (*self.workers, *self.schedulers):
            self._kill(process)
        with kombu.Connection(BROKERS[self.report.name]) as connection, connection.channel() as channel:
            channel.queue_delete(self.queue)
            channel.exchange_delete(self.queue)

    def _clean_up(self) -> None:
        self.disk.make_room()
        name = sql.Identifier(self.database)
        self.admin.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(name))
        self.admin.execute(sql.SQL("DROP TABLESPACE IF EXISTS {}").format(name))
        self.disk.close()


class _Local(_Deployment):
    """One `nightdraft run` after the other on an SQLite file."""

    def __enter__(self) -> Self:
        self.disk = _Disk(self.folder / "disk", 64, str(os.getuid()))
        self.url = f"sqlite:///{self.disk.folder}/jobs.db"
        self.store = Store.open(self.url, patience=5.0)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.store.dispose()
        self.disk.close()

    def go_through(self, kills: int) -> None:
        path = self.folder / "prompts.parquet"
        pq.write_table(pa.table({"prompt": [f"Tell me about number {row}." for row in range(ROWS)]}), path)
        while self.report.kills.total() < kills:
            self._run_to_its_end(path, f"job-{len(self.jobs)}", kills)
        self.check(self.store, None)

    def _run_to_its_end(self, path: Path, name: str, kills: int) -> None:
        deadline = time.monotonic() + END_SECONDS
        while time.monotonic() < deadline:
            process = self._start_run(path, name)
            blow = self.report.kills.total() < kills
            if self._disturb(process, name, kill=blow):
                continue
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
            if process.poll() != 0:
                process.kill()
                self.report.interventions.append(f"a run ended with {process.poll()}: {self.log_of_last_exit()}")
            break
        self.jobs.append(self.store.jobs.get(name))

    def _disturb(self, process: subprocess.Popen[bytes], name: str, *, kill: bool) -> bool:
        """Freeze it or fill its disk while it works, then kill it; False when it was left alone, or was faster."""
        before = self._recorded(name)
        while kill and process.poll() is None and self._recorded(name) <= before:
            time.sleep(0.05)
        if not kill or process.poll() is not None:
            return False
        time.sleep(self.dice.uniform(0.0, 0.5))
        what = self.dice.choice(["kill", "frozen processes", "full disks"])
        if what == "frozen processes":
            process.send_signal(signal.SIGSTOP)
            self.report.mixed_in[what] += 1
            time.sleep(self.dice.uniform(0.2, 2.0))
            process.send_signal(signal.SIGCONT)
        elif what == "full disks" and self.disk.mounted:
            self.disk.fill()
            self.report.mixed_in[what] += 1
            time.sleep(self.dice.uniform(0.5, 3.0))
            if self.dice.random() < 0.5:
                self.disk.make_room()
        if process.poll() is None:
            process.kill()
            self.report.kills["run"] += 1
        process.wait()
        self.disk.make_room()
        return True

    def _start_run(self, path: Path, name: str) -> subprocess.Popen[bytes]:
        main = ("-c", "from runner.cli import main; main()")
        options = ("--target", "scripted:delay_ms=20", "--max-tokens", "24", "--name", name, "--store", self.url)
        settings = (f"max_attempts={MAX_ATTEMPTS}", "chunk_rows=8", "engine.max_batch=4", "sampling.temperature=0.8")
        return self.start(*main, "run", str(path), *options, *(word for each in settings for word in ("--set", each)))

    def _recorded(self, name: str) -> int:
        with suppress(StoreUnavailable):
            job = self.store.jobs.find(name)
            return 0 if job is None else self.store.jobs.progress(job.id).counts.num_ok
        return 0
