"""What happens to chunks whose lease ran out: again, then row by row, until the poison row is named and recorded."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

import sqlalchemy as sa

from storage.processes import has_ended, this_process
from storage.records import Chunk, ChunkState, JobState, Lease, Result, RowInHand, RowStatus
from storage.sql import sessions
from storage.sql.database import clock
from storage.sql.tables import chunks, jobs, results
from storage.store.chunks import Chunks
from storage.store.jobs import fail_job
from storage.store.results import write_unrecorded
from storage.store.room import Room, reads
from storage.store.rows import chunk_from_row, spec_from_row
from storage.store.states import STOPPING, UNLEASED, due_again, lock
from storage.store.telemetry import Telemetry

WORKER_CRASHED = "worker_crashed"
"""Error code of a row that was alone in the hands of a worker when it died; and of a job whose workers die before they
have a row in their hands."""


def under_suspicion(attempts: int, max_attempts: int) -> bool:
    """Whether a chunk has lost so many workers that its rows run one at a time, each noted before it is touched.

    So the next death names the row: with p rows that kill, a chunk dies max(max_attempts, 2) - 1 + p times in all.
    """
    return attempts >= _before_suspicion(max_attempts)


def _before_suspicion(max_attempts: int) -> int:
    return max(max_attempts - 1, 1)


class PoisonedRow(NamedTuple):
    job_id: str
    row_index: int


@dataclass(slots=True)
class Reaped:
    released: list[Chunk] = field(default_factory=list)
    """Chunks that are pending again, as they are now."""
    suspected: list[Chunk] = field(default_factory=list)
    """Those of them whose rows run one at a time from now on."""
    poisoned: list[PoisonedRow] = field(default_factory=list)
    """Rows that were given up and have an error recorded."""
    cancelled: list[int] = field(default_factory=list)
    """Ids of expired chunks of jobs that are being stopped."""
    failed: list[str] = field(default_factory=list)
    """Ids of jobs that were ended because their workers die before they have a row in their hands."""

    def add(self, other: Reaped) -> None:
        self.released += other.released
        self.suspected += other.suspected
        self.poisoned += other.poisoned
        self.cancelled += other.cancelled
        self.failed += other.failed


class Reaper(Room):
    @reads
    def expired_jobs(self, connection: sa.Connection) -> list[str]:
        """Ids of the jobs of which `reap` would find something."""
        return list(_expired(connection, None, None))

    def reap(self, now: datetime | None = None, job_id: str | None = None) -> Reaped:
        """Take the chunks (of one job, or of all) whose lease ended before `now` (None: the store's clock).

        Each goes back to pending with one more attempt; one attempt before the job's `max_attempts` it is under
        suspicion, and its rows run one at a time. The row that was then in hand is given up,
        with the error "worker_crashed" recorded. One transaction for each job.
        """
        reaped = Reaped()
        expired = self.database.read(_expired, now, job_id)
        if expired and not self.database.is_sqlite:
            # A frozen session may hold the lock of its chunk, which would be skipped below.
            self.database.read(sessions.end_frozen)
        for job, ids in expired.items():
            reaped.add(self.database.write(_reap_job, job, ids, now))
        return reaped

    def expire_dead_workers(self) -> int:
        """Let the leases of workers end that ran here, among the processes that this one sees, and run no more; how
        many. A worker anywhere else is dead when it has been silent for a lease."""
        chunks, telemetry = Chunks(self.database), Telemetry(self.database)
        observer = this_process()
        expired = 0
        for worker in telemetry.workers():
            if has_ended(worker.process, observer):
                expired += chunks.expire_leases(worker.worker_id)
                telemetry.worker_gone(worker.worker_id)
        return expired


def _expired(connection: sa.Connection, now: datetime | None, job_id: str | None) -> dict[str, list[int]]:
    """Ids of the running chunks (of one job, or of all) whose lease ended before `now` (None: the store's clock), by
    job."""
    query = (
        sa.select(chunks.c.job_id, chunks.c.id)
        .where(chunks.c.state == ChunkState.RUNNING, chunks.c.lease_until < _or_now(connection, now))
        .order_by(chunks.c.id)
    )
    if job_id is not None:
        query = query.where(chunks.c.job_id == job_id)
    found: dict[str, list[int]] = {}
    for row in connection.execute(query):
        found.setdefault(row.job_id, []).append(row.id)
    return found


def _reap_job(connection: sa.Connection, job_id: str, chunk_ids: list[int], now: datetime | None) -> Reaped:
    """Take the expired ones of these chunks from their workers."""
    reaped = Reaped()
    # The job first, then its chunks, as where a job is stopped: another order could deadlock.
    state = lock(connection, job_id)
    stored = connection.execute(sa.select(jobs.c.name, jobs.c.spec).where(jobs.c.id == job_id)).one()
    limit = spec_from_row(stored).max_attempts
    for chunk_id in chunk_ids:
        row = _lock_expired(connection, chunk_id, now)
        if row is None:
            continue  # its worker, or another reaper, was quicker since `_expired` looked
        if state in STOPPING:
            _update(connection, row, state=ChunkState.CANCELLED)
            reaped.cancelled.append(chunk_id)
        elif _take_back(connection, row, limit, reaped):
            state = JobState.FAILED  # one of STOPPING: the job's other expired chunks are cancelled
    return reaped


def _take_back(connection: sa.Connection, row: Any, limit: int, reaped: Reaped) -> bool:
    """Queue a chunk again, or end it when all is recorded. Returns whether its job was ended instead."""
    unfinished = _unfinished_rows(connection, row)
    suspected, in_hand = under_suspicion(row.attempts, limit), row.in_hand
    attempts = row.attempts + 1
    if suspected and in_hand is not None:
        attempts = row.attempts  # this death is the row's, or came after some were through
        if in_hand["row_index"] in unfinished:
            _give_up(connection, row, RowInHand(**in_hand))
            reaped.poisoned.append(PoisonedRow(row.job_id, in_hand["row_index"]))
            unfinished.remove(in_hand["row_index"])
    if not unfinished:
        _update(connection, row, state=ChunkState.DONE, attempts=attempts)
    elif attempts >= _before_suspicion(limit) + limit:
        # Deaths with a row in hand count no attempt, so these workers died before they had one.
        _update(connection, row, state=ChunkState.CANCELLED, attempts=attempts)
        fail_job(connection, row.job_id, WORKER_CRASHED, _no_row_in_hand(row, attempts))
        reaped.failed.append(row.job_id)
        return True
    else:
        released = _update(connection, row, state=ChunkState.PENDING, attempts=attempts)
        reaped.released.append(released)
        if under_suspicion(attempts, limit):
            reaped.suspected.append(released)
    return False


def _no_row_in_hand(row: Any, attempts: int) -> str:
    last = row.start_row + row.num_rows - 1
    return (
        f"{attempts} workers died or went silent over rows {row.start_row} to {last}, the last ones before they had a"
        " row in their hands: their logs say why (too little memory for the model?); mend it and resume the job"
    )


def _give_up(connection: sa.Connection, row: Any, in_hand: RowInHand) -> None:
    """Record an error for every sample of the row in hand that has no record."""
    message = (
        f"the worker died or went silent with this row alone in its hands, after {row.attempts} had with the rows"
        " around it; `nightdraft retry JOB --failed` tries it again"
    )
    batch = [
        Result(
            in_hand.row_index,
            sample,
            RowStatus.ERROR,
            error_code=WORKER_CRASHED,
            error_message=message,
            row_id=in_hand.row_id,
            carried=in_hand.carried,
        )
        for sample in range(row.num_samples)
    ]
    write_unrecorded(connection, Lease(row.id, row.epoch), batch)


def _unfinished_rows(connection: sa.Connection, row: Any) -> list[int]:
    """Row indexes of a chunk that lack the record of a sample, in order."""
    end = row.start_row + row.num_rows
    query = (
        sa.select(results.c.row_index)
        .where(results.c.job_id == row.job_id, results.c.row_index >= row.start_row, results.c.row_index < end)
        .group_by(results.c.row_index)
        .having(sa.func.count() == row.num_samples)
    )
    if row.retry_epoch:
        query = query.where(sa.not_(due_again(row.retry_epoch)))
    finished = set(connection.execute(query).scalars())
    return [index for index in range(row.start_row, end) if index not in finished]


def _lock_expired(connection: sa.Connection, chunk_id: int, now: datetime | None) -> Any | None:
    query = (
        sa.select(*chunks.c, jobs.c.num_samples)
        .join(jobs, jobs.c.id == chunks.c.job_id)
        .where(
            chunks.c.id == chunk_id,
            chunks.c.state == ChunkState.RUNNING,
            chunks.c.lease_until < _or_now(connection, now),
        )
        .with_for_update(skip_locked=True, of=chunks, key_share=True)
    )
    return connection.execute(query).one_or_none()


def _update(connection: sa.Connection, row: Any, **values: Any) -> Chunk:
    statement = sa.update(chunks).where(chunks.c.id == row.id).values({**UNLEASED, **values}).returning(*chunks.c)
    return chunk_from_row(connection.execute(statement).one())


def _or_now(connection: sa.Connection, now: datetime | None) -> Any:
    return clock(connection) if now is None else now
