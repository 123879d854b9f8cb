"""What ran, where, and how busy it was: models, speculators, workers, engine samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from storage.processes import ProcessIdentity
from storage.records import TOKEN_COUNTS, ChunkState, TokenCounts
from storage.sql.database import clock, later
from storage.sql.tables import chunks, engine_samples, models, speculators, workers
from storage.store.room import Room, reads, writes

ALIVE_SECONDS = 60.0
"""A worker that was not seen for longer counts as gone."""


@dataclass(frozen=True, slots=True)
class EngineSample:
    """One reading of an engine's gauges."""

    worker_id: str
    sampled_at: datetime
    job_id: str | None
    """What the engine did since the reading before it did for this job, the one that it turned to last."""
    num_running: int
    num_waiting: int
    num_kv_blocks_used: int
    num_kv_blocks: int
    tokens: TokenCounts
    """Totals since the engine started, with what running requests have emitted so far, and what aborted and failed
    ones had."""


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker process that has reported itself."""

    worker_id: str
    hostname: str
    pid: int
    started_at: datetime
    last_seen: datetime
    boot_id: str | None = None
    pid_namespace: str | None = None
    process_start: str | None = None
    job_id: str | None = None
    """The one job that it works on; None: on any."""

    @property
    def process(self) -> ProcessIdentity:
        return ProcessIdentity(self.hostname, self.pid, self.boot_id, self.pid_namespace, self.process_start)


@dataclass(frozen=True, slots=True)
class Activity:
    """Who works on a job, by the store's clock."""

    num_chunks: int
    """Chunks in the hands of workers: their leases hold."""
    num_workers: int
    """Workers seen within `ALIVE_SECONDS` that take its chunks."""

    @property
    def nobody(self) -> bool:
        return not (self.num_chunks or self.num_workers)


class Telemetry(Room):
    @writes
    def write_engine_samples(self, connection: sa.Connection, samples: Sequence[EngineSample]) -> None:
        if samples:
            statement = _insert(connection, engine_samples).on_conflict_do_nothing()
            connection.execute(statement, [_sample_values(sample) for sample in samples])

    @reads
    def latest_engine_samples(self, connection: sa.Connection) -> list[EngineSample]:
        """The newest reading of each worker that has not signed off."""
        same_worker = engine_samples.alias()
        newest = sa.select(sa.func.max(same_worker.c.sampled_at)).where(same_worker.c.worker_id == workers.c.worker_id)
        same = sa.and_(
            engine_samples.c.worker_id == workers.c.worker_id, engine_samples.c.sampled_at == newest.scalar_subquery()
        )
        rows = connection.execute(sa.select(*engine_samples.c).join(workers, same)).mappings()
        return [_sample_from_row(row) for row in rows]

    @writes
    def worker_seen(
        self, connection: sa.Connection, worker_id: str, process: ProcessIdentity, job_id: str | None = None
    ) -> None:
        """Note that a worker lives: a row on its first report, `last_seen` on every later one."""
        now = clock(connection)
        changed = {
            "last_seen": now,
            "hostname": process.hostname,
            "pid": process.pid,
            "boot_id": process.boot_id,
            "pid_namespace": process.pid_namespace,
            "process_start": process.start,
            "job_id": job_id,
        }
        statement = _insert(connection, workers).values(worker_id=worker_id, started_at=now, **changed)
        connection.execute(statement.on_conflict_do_update(index_elements=["worker_id"], set_=changed))

    @writes
    def worker_gone(self, connection: sa.Connection, worker_id: str) -> None:
        connection.execute(sa.delete(workers).where(workers.c.worker_id == worker_id))

    @reads
    def workers(self, connection: sa.Connection) -> list[WorkerInfo]:
        """All workers that reported themselves and did not sign off, the last seen first."""
        rows = connection.execute(sa.select(workers).order_by(workers.c.last_seen.desc(), workers.c.worker_id))
        return [WorkerInfo(**row) for row in rows.mappings()]

    @reads
    def activity(self, connection: sa.Connection, job_id: str) -> Activity:
        """Who works on the job now."""
        held = sa.select(sa.func.count()).where(
            chunks.c.job_id == job_id, chunks.c.state == ChunkState.RUNNING, chunks.c.lease_until >= clock(connection)
        )
        serving = sa.select(sa.func.count()).where(
            workers.c.last_seen >= later(connection, -ALIVE_SECONDS),
            sa.or_(workers.c.job_id == job_id, workers.c.job_id.is_(None)),
        )
        return Activity(int(connection.execute(held).scalar_one()), int(connection.execute(serving).scalar_one()))

    @writes
    def record_model(
        self,
        connection: sa.Connection,
        job_id: str,
        role: str,
        name: str,
        content_hash: str,
        parameters: Mapping[str, Any],
        report: Mapping[str, Any],
    ) -> None:
        values = {
            "job_id": job_id,
            "role": role,
            "name": name,
            "content_hash": content_hash,
            "parameters": dict(parameters),
            "report": dict(report),
            "recorded_at": clock(connection),
        }
        connection.execute(_insert(connection, models).values(values).on_conflict_do_nothing())

    @writes
    def record_speculator(
        self, connection: sa.Connection, job_id: str, method: str, verify: str, parameters: Mapping[str, Any]
    ) -> None:
        values = {
            "job_id": job_id,
            "method": method,
            "verify": verify,
            "parameters": dict(parameters),
            "recorded_at": clock(connection),
        }
        connection.execute(_insert(connection, speculators).values(values).on_conflict_do_nothing())

    @reads
    def models(self, connection: sa.Connection, job_id: str) -> list[dict[str, Any]]:
        query = sa.select(models).where(models.c.job_id == job_id).order_by(models.c.role.desc(), models.c.recorded_at)
        return [dict(row) for row in connection.execute(query).mappings()]

    @reads
    def speculators(self, connection: sa.Connection, job_id: str) -> list[dict[str, Any]]:
        query = sa.select(speculators).where(speculators.c.job_id == job_id).order_by(speculators.c.recorded_at)
        return [dict(row) for row in connection.execute(query).mappings()]


def _sample_values(sample: EngineSample) -> dict[str, Any]:
    values = asdict(sample)
    tokens = values.pop("tokens")
    return {**values, **tokens}


def _sample_from_row(row: sa.RowMapping) -> EngineSample:
    values: dict[str, Any] = dict(row)
    tokens = TokenCounts(**{name: values.pop(name) for name in TOKEN_COUNTS})
    return EngineSample(**values, tokens=tokens)


def _insert(connection: sa.Connection, table: sa.Table) -> Any:
    return sqlite.insert(table) if connection.dialect.name == "sqlite" else postgresql.insert(table)
