"""What the scheduler asks on every round: few rows or counts, whatever the size of the jobs."""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa

from storage.records import ChunkState, Job, JobState
from storage.sql.tables import chunks, jobs
from storage.store.jobs import job_from_row

OPEN = (ChunkState.PENDING, ChunkState.DISPATCHED, ChunkState.RUNNING)


@dataclass(frozen=True, slots=True)
class DoneCounts:
    """Results in chunks that are done; errors that a retry generates again are not among them."""

    num_ok: int
    num_errors: int


def unfinished_jobs(connection: sa.Connection) -> list[Job]:
    """Jobs that have not ended, oldest first."""
    ended = [state for state in JobState if state.terminal]
    query = sa.select(jobs).where(jobs.c.state.not_in(ended)).order_by(jobs.c.created_at, jobs.c.id)
    return [job_from_row(row) for row in connection.execute(query)]


def count_dispatched(connection: sa.Connection) -> int:
    """Chunks that are dispatched and not claimed, over all jobs."""
    query = sa.select(sa.func.count()).select_from(chunks).where(chunks.c.state == ChunkState.DISPATCHED)
    return int(connection.execute(query).scalar_one())


def done_counts(connection: sa.Connection, job_id: str) -> DoneCounts:
    sums = (sa.func.coalesce(sa.func.sum(chunks.c[name]), 0) for name in ("num_ok", "num_errors"))
    query = sa.select(*sums).where(chunks.c.job_id == job_id, chunks.c.state == ChunkState.DONE)
    num_ok, num_errors = connection.execute(query).one()
    return DoneCounts(int(num_ok), int(num_errors))


def is_settled(connection: sa.Connection, job_id: str) -> bool:
    """Whether none of the job's chunks waits or runs; a read, so that asking often disturbs nobody."""
    is_open = sa.and_(chunks.c.job_id == job_id, chunks.c.state.in_(OPEN))
    return connection.execute(sa.select(chunks.c.id).where(is_open).limit(1)).scalar() is None
