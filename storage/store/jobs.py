"""Statements on jobs and their input files."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError

from storage.errors import InvalidPlan, JobExists, UnknownJob, UnstorableText
from storage.records import Chunk, InputFile, Job, JobState
from storage.sql.database import clock
from storage.sql.encoding import is_faithful
from storage.sql.tables import chunks, input_files, jobs
from storage.suggest import did_you_mean

PLAN_BATCH = 2000
"""Chunks inserted per statement while a plan streams in."""

ACTIVE = (JobState.QUEUED, JobState.IN_PROGRESS)
"""States in which chunks are handed out."""


def create(connection: sa.Connection, job: Job, files: Sequence[InputFile], plan: Iterable[Chunk]) -> None:
    """Insert a job with everything that belongs to it.

    Raises `JobExists`, `InvalidPlan` when the chunks do not cover rows 0 to num_rows - 1 once, in order, and
    `UnstorableText` for a NUL character or lone surrogate in the name or the spec: neither may be altered silently.
    """
    if not is_faithful(job.name) or not is_faithful(job.spec):
        raise UnstorableText(
            f"the name or the spec of job {job.name!r} holds a NUL character, half a surrogate pair or a number that"
            " is not finite; remove it"
        )
    try:
        connection.execute(sa.insert(jobs), _job_values(job))
    except IntegrityError as error:
        raise JobExists(f"there is already a job named {job.name!r}; choose another name") from error
    if files:
        connection.execute(sa.insert(input_files), [_file_values(job.id, file) for file in files])
    covered = 0
    plan = iter(plan)
    while batch := list(islice(_checked(plan, job, covered), PLAN_BATCH)):
        connection.execute(sa.insert(chunks), [_chunk_values(job.id, chunk) for chunk in batch])
        covered = batch[-1].start_row + batch[-1].num_rows
    if covered != job.num_rows:
        raise InvalidPlan(f"job {job.name!r} has {job.num_rows} rows, but its chunks end at row {covered}")


def find_by_name(connection: sa.Connection, name: str) -> Job | None:
    row = connection.execute(sa.select(jobs).where(jobs.c.name == name)).one_or_none()
    return None if row is None else job_from_row(row)


def get(connection: sa.Connection, reference: str) -> Job:
    """The job of that id, name, unique id prefix, or the newest for "last". Raises `UnknownJob` with near names."""
    for clause in (jobs.c.id == reference, jobs.c.name == reference):
        row = connection.execute(sa.select(jobs).where(clause)).one_or_none()
        if row is not None:
            return job_from_row(row)
    if reference == "last":
        newest = list_newest(connection, 1)
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


def list_newest(connection: sa.Connection, limit: int) -> list[Job]:
    query = sa.select(jobs).order_by(jobs.c.created_at.desc(), jobs.c.id.desc()).limit(limit)
    return [job_from_row(row) for row in connection.execute(query)]


def files_of(connection: sa.Connection, job_id: str) -> list[InputFile]:
    query = sa.select(input_files).where(input_files.c.job_id == job_id).order_by(input_files.c.index)
    return [_file_from_row(row) for row in connection.execute(query)]


def set_state(
    connection: sa.Connection,
    job_id: str,
    state: JobState,
    expected: Collection[JobState] | None,
    error_code: str | None,
    error_message: str | None,
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


def job_from_row(row: Any) -> Job:
    return Job(
        id=row.id,
        name=row.name,
        state=row.state,
        spec=row.spec,
        spec_hash=row.spec_hash,
        num_rows=row.num_rows,
        num_samples=row.num_samples,
        created_at=row.created_at,
        started_at=row.started_at,
        finished_at=row.finished_at,
        error_code=row.error_code,
        error_message=row.error_message,
        notes=tuple(row.notes),
    )


def _checked(plan: Iterator[Chunk], job: Job, covered: int) -> Iterator[Chunk]:
    for chunk in plan:
        if chunk.start_row != covered or chunk.num_rows < 1:
            raise InvalidPlan(
                f"chunk {chunk.index} of job {job.name!r} has {chunk.num_rows} rows from row {chunk.start_row};"
                f" the chunks before it end at row {covered}"
            )
        covered += chunk.num_rows
        yield chunk


def _job_values(job: Job) -> dict[str, Any]:
    names = (column.name for column in jobs.columns)
    return {**{name: getattr(job, name) for name in names}, "notes": list(job.notes)}


def _file_values(job_id: str, file: InputFile) -> dict[str, Any]:
    return {
        "job_id": job_id,
        "index": file.index,
        "path": file.path,
        "size": file.size,
        "modified": file.modified,
        "schema": file.schema,
        "row_groups": list(file.row_groups),
        "first_row": file.first_row,
        "partitions": file.partitions,
    }


def _file_from_row(row: Any) -> InputFile:
    return InputFile(
        index=row._mapping["index"],
        path=row.path,
        size=row.size,
        modified=row.modified,
        schema=row.schema,
        row_groups=tuple(row.row_groups),
        first_row=row.first_row,
        partitions=row.partitions,
    )


def _chunk_values(job_id: str, chunk: Chunk) -> dict[str, Any]:
    values = {
        "job_id": job_id,
        "index": chunk.index,
        "file_index": chunk.file_index,
        "start_row": chunk.start_row,
        "file_row": chunk.file_row,
        "num_rows": chunk.num_rows,
        "state": chunk.state,
        "epoch": chunk.epoch,
        "attempts": chunk.attempts,
    }
    if chunk.id:
        values["id"] = chunk.id
    return values


def _unknown(connection: sa.Connection, reference: str) -> str:
    recent = connection.execute(sa.select(jobs.c.name).order_by(jobs.c.created_at.desc()).limit(500)).scalars().all()
    near = did_you_mean(reference, recent, most=3) or "; `nightdraft status` lists the jobs"
    return f"no job has the id or name {reference!r}{near}"
