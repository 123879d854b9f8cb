"""Stopping, resuming, retrying and ending jobs. Each locks the job before its chunks (see `storage.store.chunks`)."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from storage.errors import JobStopped, UnknownJob
from storage.records import ChunkState, Job, JobState
from storage.sql.tables import chunks, jobs
from storage.store import jobs as job_statements
from storage.store.chunks import CLAIMABLE, UNLEASED
from storage.store.jobs import ACTIVE

STOPPABLE = (JobState.VALIDATING, *ACTIVE, JobState.FINALIZING)


def cancel(connection: sa.Connection, job_id: str) -> JobState:
    """Stop a job; its state afterwards. What is recorded stays. A job that has ended is left as it is."""
    state = _locked(connection, job_id)
    if state in (*STOPPABLE, JobState.CANCELLING):
        _cancel_waiting_chunks(connection, job_id)
        state = JobState.CANCELLING if _count(connection, job_id, ChunkState.RUNNING) else JobState.CANCELLED
        job_statements.set_state(connection, job_id, state, None, None, None)
    return state


def fail(connection: sa.Connection, job_id: str, error_code: str, error_message: str) -> bool:
    """Stop a job as failed; False when it had ended or was being stopped already."""
    if _locked(connection, job_id) not in STOPPABLE:
        return False
    _cancel_waiting_chunks(connection, job_id)
    return job_statements.set_state(connection, job_id, JobState.FAILED, None, error_code, error_message)


def resume(connection: sa.Connection, job_id: str) -> int:
    """Open a stopped job's cancelled chunks again; how many. A job that runs, or is completed, is left as it is."""
    state = _locked(connection, job_id)
    if state is JobState.COMPLETED or state in STOPPABLE:
        return 0
    reopened = _reopen_cancelled(connection, job_id)
    job_statements.set_state(connection, job_id, JobState.QUEUED, None, None, None)
    return reopened


def retry_failed(connection: sa.Connection, job_id: str) -> int:
    """Have every recorded error generated again; how many chunks that opens. Successes stay as they are.

    A stopped job is resumed with it, since it could not end otherwise. With no error recorded nothing changes.
    Raises `JobStopped` while the job is being cancelled.
    """
    state = _locked(connection, job_id)
    if state is JobState.CANCELLING:
        raise JobStopped(f"job {job_id} is being cancelled; wait until it is cancelled, then retry")
    statement = (
        sa.update(chunks)
        .where(
            chunks.c.job_id == job_id,
            chunks.c.num_errors > 0,
            chunks.c.state.in_((ChunkState.DONE, ChunkState.CANCELLED)),
        )
        .values(state=ChunkState.PENDING, attempts=0, retry_epoch=chunks.c.epoch + 1, **UNLEASED)
    )
    reopened = connection.execute(statement).rowcount
    if reopened and state.terminal:
        _reopen_cancelled(connection, job_id)
        job_statements.set_state(connection, job_id, JobState.QUEUED, None, None, None)
    return reopened


def finalize_if_done(connection: sa.Connection, job_id: str) -> Job | None:
    """End a job of which nothing is left to do: the job if it has ended (now or before), else None."""
    state = _locked(connection, job_id)
    if state is JobState.CANCELLING and not _count(connection, job_id, ChunkState.RUNNING):
        job_statements.set_state(connection, job_id, JobState.CANCELLED, None, None, None)
    elif state in STOPPABLE and not _count(connection, job_id, *(s for s in ChunkState if s is not ChunkState.DONE)):
        job_statements.set_state(connection, job_id, JobState.COMPLETED, None, None, None)
    elif not state.terminal:
        return None
    return job_statements.get(connection, job_id)


def _locked(connection: sa.Connection, job_id: str) -> JobState:
    state = job_statements.lock(connection, job_id)
    if state is None:
        raise UnknownJob(f"no job has the id {job_id!r}")
    return state


def _cancel_waiting_chunks(connection: sa.Connection, job_id: str) -> None:
    waiting = sa.and_(chunks.c.job_id == job_id, chunks.c.state.in_(CLAIMABLE))
    connection.execute(sa.update(chunks).where(waiting).values(state=ChunkState.CANCELLED, **UNLEASED))


def _reopen_cancelled(connection: sa.Connection, job_id: str) -> int:
    cancelled = sa.and_(chunks.c.job_id == job_id, chunks.c.state == ChunkState.CANCELLED)
    values: dict[str, Any] = {"state": ChunkState.PENDING, "attempts": 0, **UNLEASED}
    return connection.execute(sa.update(chunks).where(cancelled).values(values)).rowcount


def _count(connection: sa.Connection, job_id: str, *states: ChunkState) -> int:
    query = (
        sa.select(sa.func.count())
        .select_from(chunks)
        .join(jobs, jobs.c.id == chunks.c.job_id)
        .where(jobs.c.id == job_id, chunks.c.state.in_(states))
    )
    return int(connection.execute(query).scalar_one())
