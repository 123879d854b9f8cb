"""Jobs: new ones, found ones, how far they are, and how they stop, go on and end.

What changes the state of a job locks the job before its chunks, as a claim does (see `storage.store.chunks`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from storage.errors import InvalidPlan, JobExists, JobStopped, UnknownJob, UnstorableText
from storage.records import COUNTS, Chunk, ChunkState, Counts, InputFile, Job, JobProgress, JobState
from storage.sql.encoding import is_faithful
from storage.sql.tables import chunks, input_files, jobs
from storage.store.room import Room, reads, writes, writes_once
from storage.store.rows import chunk_values, file_from_row, file_values, job_from_row, job_values
from storage.store.states import ACTIVE, CLAIMABLE, OPEN, UNLEASED, lock_known, set_state
from storage.suggest import did_you_mean

PLAN_BATCH = 2000
"""Chunks inserted per statement while a plan streams in."""


class Jobs(Room):
    @writes_once
    def create(self, connection: sa.Connection, job: Job, files: Sequence[InputFile], plan: Iterable[Chunk]) -> None:
        """Insert a job with everything that belongs to it in one transaction, streaming the chunks.

        Raises `JobExists`, `InvalidPlan` when the chunks do not cover rows 0 to num_rows - 1 once, in order, and
        `UnstorableText` for a NUL character or lone surrogate in the name or the spec: neither may be altered
        silently.
        """
        if not is_faithful(job.name) or not is_faithful(job.spec.to_json()):
            raise UnstorableText(
                f"the name or the spec of job {job.name!r} holds a NUL character, half a surrogate pair or a number"
                " that is not finite; remove it"
            )
        try:
            connection.execute(sa.insert(jobs), job_values(job))
        except IntegrityError as error:
            raise JobExists(f"there is already a job named {job.name!r}; choose another name") from error
        if files:
            connection.execute(sa.insert(input_files), [file_values(job.id, file) for file in files])
        covered = 0
        plan = iter(plan)
        while batch := list(islice(_checked(plan, job, covered), PLAN_BATCH)):
            connection.execute(sa.insert(chunks), [chunk_values(job.id, chunk) for chunk in batch])
            covered = batch[-1].start_row + batch[-1].num_rows
        if covered != job.num_rows:
            raise InvalidPlan(f"job {job.name!r} has {job.num_rows} rows, but its chunks end at row {covered}")

    @reads
    def get(self, connection: sa.Connection, reference: str) -> Job:
        """The job of that id, name, unique id prefix, or the newest for "last". Raises `UnknownJob` with near names."""
        return get_job(connection, reference)

    @reads
    def find(self, connection: sa.Connection, name: str) -> Job | None:
        """The job of exactly that name."""
        row = connection.execute(sa.select(jobs).where(jobs.c.name == name)).one_or_none()
        return None if row is None else job_from_row(row)

    @reads
    def newest(self, connection: sa.Connection, limit: int = 50) -> list[Job]:
        """The newest jobs, newest first."""
        return _newest(connection, limit)

    @reads
    def unfinished(self, connection: sa.Connection) -> list[str]:
        """Ids of the jobs that have not ended, oldest first."""
        ended = [state for state in JobState if state.terminal]
        query = sa.select(jobs.c.id).where(jobs.c.state.not_in(ended)).order_by(jobs.c.created_at, jobs.c.id)
        return list(connection.execute(query).scalars())

    @reads
    def files(self, connection: sa.Connection, job_id: str) -> list[InputFile]:
        query = sa.select(input_files).where(input_files.c.job_id == job_id).order_by(input_files.c.index)
        return [file_from_row(row) for row in connection.execute(query)]

    @reads
    def progress(self, connection: sa.Connection, job_id: str) -> JobProgress:
        """Counts over the whole job: sums over its chunks' counters, cheap however many rows it has."""
        size = connection.execute(
            sa.select(jobs.c.num_rows, jobs.c.num_samples).where(jobs.c.id == job_id)
        ).one_or_none()
        if size is None:
            raise UnknownJob(f"no job has the id {job_id!r}")
        found = _counts_by_state(connection, job_id)
        return JobProgress(
            num_results=size.num_rows * size.num_samples,
            chunks={state: found[state][0] if state in found else 0 for state in ChunkState},
            counts=Counts(**{name: sum(getattr(each, name) for _, each in found.values()) for name in COUNTS}),
        )

    @reads
    def done_counts(self, connection: sa.Connection, job_id: str) -> Counts:
        """Counts in the job's finished chunks; errors that a retry generates again are not among them."""
        return _counts_by_state(connection, job_id).get(ChunkState.DONE, (0, Counts()))[1]

    @reads
    def is_settled(self, connection: sa.Connection, job_id: str) -> bool:
        """Whether none of the job's chunks waits or runs; a read, so that asking often disturbs nobody.

        When it is true it is time to call `finalize_if_done`.
        """
        is_open = sa.and_(chunks.c.job_id == job_id, chunks.c.state.in_(OPEN))
        return connection.execute(sa.select(chunks.c.id).where(is_open).limit(1)).scalar() is None

    @writes
    def cancel(self, connection: sa.Connection, job_id: str) -> JobState:
        """Stop a job; its state afterwards. What is recorded stays. A job that has ended is left as it is."""
        state = lock_known(connection, job_id)
        if state in (*ACTIVE, JobState.CANCELLING):
            _cancel_waiting_chunks(connection, job_id)
            state = JobState.CANCELLING if _count(connection, job_id, ChunkState.RUNNING) else JobState.CANCELLED
            set_state(connection, job_id, state)
        return state

    @writes
    def fail(self, connection: sa.Connection, job_id: str, error_code: str, error_message: str) -> bool:
        """Stop a job as failed; False when it had ended or was being stopped already."""
        return fail_job(connection, job_id, error_code, error_message)

    @writes
    def resume(self, connection: sa.Connection, job_id: str) -> int:
        """Open a stopped job's cancelled chunks again; how many. A job that runs, or is completed, is left as it is."""
        state = lock_known(connection, job_id)
        if state is JobState.COMPLETED or state in ACTIVE:
            return 0
        reopened = _reopen_cancelled(connection, job_id)
        set_state(connection, job_id, JobState.QUEUED)
        return reopened

    @writes
    def retry_failed(self, connection: sa.Connection, job_id: str) -> int:
        """Have every recorded error generated again; how many chunks that opens. Successes stay as they are.

        A stopped job is resumed with it, since it could not end otherwise. With no error recorded nothing changes.
        Raises `JobStopped` while the job is being cancelled.
        """
        state = lock_known(connection, job_id)
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
            set_state(connection, job_id, JobState.QUEUED)
        return reopened

    @writes
    def finalize_if_done(self, connection: sa.Connection, job_id: str) -> Job | None:
        """End a job of which nothing is left to do: the job if it has ended (now or before), else None."""
        state = lock_known(connection, job_id)
        if state is JobState.CANCELLING and not _count(connection, job_id, ChunkState.RUNNING):
            set_state(connection, job_id, JobState.CANCELLED)
        elif state in ACTIVE and not _count(connection, job_id, *(s for s in ChunkState if s is not ChunkState.DONE)):
            set_state(connection, job_id, JobState.COMPLETED)
        elif not state.terminal:
            return None
        return get_job(connection, job_id)


def get_job(connection: sa.Connection, reference: str) -> Job:
    for clause in (jobs.c.id == reference, jobs.c.name == reference):
        row = connection.execute(sa.select(jobs).where(clause)).one_or_none()
        if row is not None:
            return job_from_row(row)
    if reference == "last":
        newest = _newest(connection, 1)
        if newest:
            return newest[0]
        raise UnknownJob("there is no job in this store yet")
    prefix = jobs.c.id.startswith(reference, autoescape=True) if reference else sa.false()
    rows = connection.execute(sa.select(jobs).where(prefix).limit(6)).all()
    if len(rows) == 1:
        return job_from_row(rows[0])
    if rows:
        ids = ", ".join(row.id for row in rows)
        raise UnknownJob(f"{reference!r} is the beginning of several job ids: {ids}; give more of it")
    raise UnknownJob(_unknown(connection, reference))


def fail_job(connection: sa.Connection, job_id: str, error_code: str, error_message: str) -> bool:
    if lock_known(connection, job_id) not in ACTIVE:
        return False
    _cancel_waiting_chunks(connection, job_id)
    return set_state(connection, job_id, JobState.FAILED, None, error_code, error_message)


def _newest(connection: sa.Connection, limit: int) -> list[Job]:
    query = sa.select(jobs).order_by(jobs.c.created_at.desc(), jobs.c.id.desc()).limit(limit)
    return [job_from_row(row) for row in connection.execute(query)]


def _counts_by_state(connection: sa.Connection, job_id: str) -> dict[ChunkState, tuple[int, Counts]]:
    """How many of the job's chunks are in each state, and the sums of their counters."""
    sums = (sa.func.sum(chunks.c[name]) for name in COUNTS)
    query = sa.select(chunks.c.state, sa.func.count(), *sums).where(chunks.c.job_id == job_id).group_by(chunks.c.state)
    return {
        state: (number, Counts(**{name: int(count) for name, count in zip(COUNTS, counts, strict=True)}))
        for state, number, *counts in connection.execute(query)
    }


def _checked(plan: Iterator[Chunk], job: Job, covered: int) -> Iterator[Chunk]:
    for chunk in plan:
        if chunk.start_row != covered or chunk.num_rows < 1:
            raise InvalidPlan(
                f"chunk {chunk.index} of job {job.name!r} has {chunk.num_rows} rows from row {chunk.start_row};"
                f" the chunks before it end at row {covered}"
            )
        covered += chunk.num_rows
        yield chunk


def _unknown(connection: sa.Connection, reference: str) -> str:
    recent = connection.execute(sa.select(jobs.c.name).order_by(jobs.c.created_at.desc()).limit(500)).scalars().all()
    near = did_you_mean(reference, recent, most=3) or "; `nightdraft status` lists the jobs"
    return f"no job has the id or name {reference!r}{near}"


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
