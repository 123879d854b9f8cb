"""States of jobs and chunks: what each allows, and how a job moves from one to the next."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import sqlalchemy as sa

from storage.errors import UnknownJob
from storage.records import ChunkState, JobState
from storage.sql.database import clock
from storage.sql.tables import chunks, jobs, results

ACTIVE = (JobState.QUEUED, JobState.IN_PROGRESS)
"""States of a job that goes on: its chunks are handed out, and it can be stopped."""
STOPPING = (JobState.CANCELLING, JobState.CANCELLED, JobState.FAILED)
"""States of a job whose running chunks should stop."""

CLAIMABLE = (ChunkState.PENDING, ChunkState.DISPATCHED)
OPEN = (*CLAIMABLE, ChunkState.RUNNING)

UNLEASED = {
    "epoch": chunks.c.epoch + 1,
    "worker_id": None,
    "lease_until": None,
    "dispatched_at": None,
    "in_hand": None,
}
"""Columns of a chunk that nobody works on any more."""


def set_state(
    connection: sa.Connection,
    job_id: str,
    state: JobState,
    expected: Collection[JobState] | None = None,
    error_code: str | None = None,
    error_message: str | None = None,
) -> bool:
    """Move a job to a state if it is in one of `expected`; whether it was moved. Times are set on the way."""
    values: dict[str, Any] = {"state": state, "error_code": error_code, "error_message": error_message}
    if state in (JobState.IN_PROGRESS, JobState.COMPLETED):
        values["started_at"] = sa.func.coalesce(jobs.c.started_at, clock(connection))
    values["finished_at"] = clock(connection) if state.terminal else None
    statement = sa.update(jobs).where(jobs.c.id == job_id).values(values)
    if expected is not None:
        statement = statement.where(jobs.c.state.in_(list(expected)))
    return connection.execute(statement).rowcount == 1


def lock(connection: sa.Connection, job_id: str, *, share: bool = False) -> JobState | None:
    """The job's state, which nobody changes until this transaction ends. Take it before any lock on its chunks.

    `share`: others may hold it as well, none may change the state. (On SQLite the one writer needs no lock.)
    """
    query = sa.select(jobs.c.state).where(jobs.c.id == job_id)
    state: JobState | None = connection.execute(query.with_for_update(read=share, key_share=not share)).scalar()
    return state


def lock_known(connection: sa.Connection, job_id: str) -> JobState:
    """`lock`. Raises `UnknownJob`."""
    state = lock(connection, job_id)
    if state is None:
        raise UnknownJob(f"no job has the id {job_id!r}")
    return state


def given_back(state: JobState | None) -> ChunkState:
    """What becomes of a chunk that is no longer worked on, by its job's state."""
    return ChunkState.CANCELLED if state in STOPPING else ChunkState.PENDING


def due_again(retry_epoch: int) -> sa.ColumnElement[bool]:
    """Which records are errors from before a retry was asked for."""
    return sa.and_(results.c.status == sa.literal_column("'error'"), results.c.epoch < retry_epoch)
