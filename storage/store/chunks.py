"""Chunks: dispatch, claims, leases, fencing."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import sqlalchemy as sa

from storage.errors import ChunkIncomplete, LeaseLost
from storage.records import Chunk, ChunkMessage, ChunkState, JobState, Lease, RowInHand
from storage.sql.database import clock, later
from storage.sql.tables import chunks, jobs, results
from storage.store.room import Room, reads, writes
from storage.store.rows import CHUNK_COLUMNS, chunk_from_row
from storage.store.states import ACTIVE, CLAIMABLE, STOPPING, UNLEASED, due_again, given_back, lock, set_state

_IDS_PER_STATEMENT = 500


@dataclass(frozen=True, slots=True)
class Heartbeat:
    alive: bool
    """False: the lease is lost; stop and write nothing."""
    cancel_requested: bool
    """The job was stopped: record what is finished and release the chunk."""


class Chunks(Room):
    @reads
    def pending(
        self, connection: sa.Connection, job_id: str | None = None, limit: int = 100, *, or_dispatched: bool = False
    ) -> list[Chunk]:
        """Chunks that wait for dispatch (`or_dispatched`: or for whoever claims them), of jobs that run, oldest
        first."""
        states = CLAIMABLE if or_dispatched else (ChunkState.PENDING,)
        query = (
            sa.select(*CHUNK_COLUMNS)
            .join(jobs, jobs.c.id == chunks.c.job_id)
            .where(chunks.c.state.in_(states), jobs.c.state.in_(ACTIVE))
            .order_by(chunks.c.id)
            .limit(limit)
        )
        if job_id is not None:
            query = query.where(chunks.c.job_id == job_id)
        return [chunk_from_row(row) for row in connection.execute(query)]

    @reads
    def of_job(
        self, connection: sa.Connection, job_id: str, states: Collection[ChunkState] = tuple(ChunkState)
    ) -> list[Chunk]:
        """The job's chunks in these states, in row order."""
        query = sa.select(*CHUNK_COLUMNS).where(chunks.c.job_id == job_id, chunks.c.state.in_(list(states)))
        return [chunk_from_row(row) for row in connection.execute(query.order_by(chunks.c.start_row))]

    @writes
    def mark_dispatched(self, connection: sa.Connection, chunk_ids: Sequence[int]) -> int:
        """Pending chunks become dispatched; how many did."""
        changed = 0
        for start in range(0, len(chunk_ids), _IDS_PER_STATEMENT):
            some = list(chunk_ids[start : start + _IDS_PER_STATEMENT])
            statement = (
                sa.update(chunks)
                .where(chunks.c.id.in_(some), chunks.c.state == ChunkState.PENDING)
                .values(state=ChunkState.DISPATCHED, dispatched_at=clock(connection))
            )
            changed += connection.execute(statement).rowcount
        return changed

    @writes
    def requeue_stale(self, connection: sa.Connection, older_than: float) -> int:
        """Chunks dispatched more than `older_than` seconds ago that nobody claimed become pending again.

        The epoch stays: should the message only be late, whichever copy comes first claims the chunk.
        """
        statement = (
            sa.update(chunks)
            .where(chunks.c.state == ChunkState.DISPATCHED, chunks.c.dispatched_at <= later(connection, -older_than))
            .values(state=ChunkState.PENDING, dispatched_at=None)
        )
        return connection.execute(statement).rowcount

    @reads
    def count_dispatched(self, connection: sa.Connection) -> int:
        """Chunks that are dispatched and not claimed, over all jobs."""
        query = sa.select(sa.func.count()).select_from(chunks).where(chunks.c.state == ChunkState.DISPATCHED)
        return int(connection.execute(query).scalar_one())

    @writes
    def claim(
        self,
        connection: sa.Connection,
        message: ChunkMessage,
        worker_id: str,
        lease_seconds: float,
    ) -> Chunk | None:
        """Take the chunk that a message names, raising its epoch; None for a duplicate or stale message, and for a
        chunk that is not of the message's job."""
        wanted = sa.and_(
            chunks.c.id == message.chunk_id,
            chunks.c.epoch == message.epoch,
            chunks.c.job_id == message.job_id,
            chunks.c.state.in_(CLAIMABLE),
        )
        if connection.execute(sa.select(chunks.c.id).where(wanted)).scalar() is None:
            return None
        if not _start_job(connection, message.job_id):
            return None
        statement = (
            sa.update(chunks)
            .where(wanted)
            .values(
                state=ChunkState.RUNNING,
                epoch=chunks.c.epoch + 1,
                worker_id=worker_id,
                lease_until=later(connection, lease_seconds),
                in_hand=None,
            )
            .returning(*CHUNK_COLUMNS)
        )
        row = connection.execute(statement).one_or_none()
        return None if row is None else chunk_from_row(row)

    @writes
    def heartbeat(self, connection: sa.Connection, lease: Lease, lease_seconds: float) -> Heartbeat:
        """Extend the lease; `alive` is False when it was lost."""
        statement = (
            sa.update(chunks)
            .where(_held(lease))
            .values(lease_until=later(connection, lease_seconds))
            .returning(chunks.c.job_id)
        )
        job_id = connection.execute(statement).scalar()
        if job_id is None:
            return Heartbeat(alive=False, cancel_requested=False)
        state = connection.execute(sa.select(jobs.c.state).where(jobs.c.id == job_id)).scalar_one()
        return Heartbeat(alive=True, cancel_requested=state in STOPPING)

    @writes
    def release(self, connection: sa.Connection, lease: Lease) -> None:
        """Give a chunk back without counting an attempt: cancelled if its job is stopped. Nothing if the lease is
        lost already."""
        job_id = connection.execute(sa.select(chunks.c.job_id).where(_held(lease))).scalar()
        if job_id is None:
            return
        state = given_back(lock(connection, job_id, share=True))
        connection.execute(sa.update(chunks).where(_held(lease)).values(state=state, **UNLEASED))

    @writes
    def expire_leases(self, connection: sa.Connection, worker_id: str) -> int:
        """End the leases of a worker that is known to be dead; how many. Reaping does the rest."""
        running = sa.and_(chunks.c.worker_id == worker_id, chunks.c.state == ChunkState.RUNNING)
        return connection.execute(sa.update(chunks).where(running).values(lease_until=later(connection, -1.0))).rowcount

    @writes
    def take_in_hand(self, connection: sa.Connection, lease: Lease, row: RowInHand) -> None:
        """Note which row is about to run alone: should it kill the worker, it is named. Raises `LeaseLost`."""
        statement = sa.update(chunks).where(_held(lease)).values(in_hand=asdict(row))
        if connection.execute(statement).rowcount != 1:
            raise _lease_lost(lease)

    @writes
    def finish(self, connection: sa.Connection, lease: Lease) -> bool:
        """Running becomes done; False when the lease is lost. Raises `ChunkIncomplete` when a record is missing."""
        row = connection.execute(_with_job().where(_under(lease))).one_or_none()
        if row is None or row.state not in (ChunkState.RUNNING, ChunkState.DONE):
            return False
        missing = _num_missing(connection, row)
        if missing:
            raise ChunkIncomplete(
                f"chunk {lease.chunk_id} of job {row.job_id} cannot be finished: {missing} of its"
                f" {row.num_rows * row.num_samples} (row, sample) pairs have no record"
            )
        if row.state is ChunkState.DONE:
            return True
        done = {"state": ChunkState.DONE, "lease_until": None, "in_hand": None}
        statement = sa.update(chunks).where(_held(lease)).values(done)
        return connection.execute(statement).rowcount == 1


def _num_missing(connection: sa.Connection, row: Any) -> int:
    """How many (row, sample) of a chunk have no record, or an error that is due again. `row`: of `with_job`."""
    end = row.start_row + row.num_rows
    query = (
        sa.select(sa.func.count())
        .select_from(results)
        .where(results.c.job_id == row.job_id, results.c.row_index >= row.start_row, results.c.row_index < end)
    )
    if row.retry_epoch:
        query = query.where(sa.not_(due_again(row.retry_epoch)))
    return int(row.num_rows * row.num_samples - connection.execute(query).scalar_one())


def require_lease(connection: sa.Connection, lease: Lease) -> Any:
    """Lock a chunk and give its row (with num_samples); raises `LeaseLost` unless it is held."""
    query = _with_job().where(_held(lease)).with_for_update(of=chunks, key_share=True)
    row = connection.execute(query).one_or_none()
    if row is None:
        raise _lease_lost(lease)
    return row


def _lease_lost(lease: Lease) -> LeaseLost:
    return LeaseLost(
        f"chunk {lease.chunk_id} no longer runs under epoch {lease.epoch}: its lease expired, was released or cancelled"
    )


def _with_job() -> sa.Select[Any]:
    return sa.select(*CHUNK_COLUMNS, chunks.c.retry_epoch, jobs.c.num_samples).join(jobs, jobs.c.id == chunks.c.job_id)


def _held(lease: Lease) -> sa.ColumnElement[bool]:
    return sa.and_(_under(lease), chunks.c.state == ChunkState.RUNNING)


def _under(lease: Lease) -> sa.ColumnElement[bool]:
    return sa.and_(chunks.c.id == lease.chunk_id, chunks.c.epoch == lease.epoch)


def _start_job(connection: sa.Connection, job_id: str) -> bool:
    """Put a queued job in progress, and hold its state; False when its chunks are not handed out.

    Whoever stops a job locks the job first and then its chunks, as is done here: so either the stop sees the chunk
    running, or the claim sees it cancelled, and the two never wait for each other in a circle.
    """
    set_state(connection, job_id, JobState.IN_PROGRESS, (JobState.QUEUED,))
    return lock(connection, job_id, share=True) in ACTIVE
