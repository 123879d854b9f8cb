"""Results: recorded fenced, in bulk, each (row, sample) once; read back in input order, page by page."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import psycopg
import sqlalchemy as sa
from sqlalchemy.exc import DataError, DBAPIError, IntegrityError

from storage.errors import InvalidResult
from storage.records import COUNTS, Chunk, Counts, Lease, Result, RowStatus
from storage.sql.tables import SAME_RESULT, acceptance, chunks, results
from storage.store.chunks import require_lease
from storage.store.room import Room, reads
from storage.store.rows import (
    ACCEPTANCE_COLUMNS,
    RESULT_COLUMNS,
    SPECULATION_COUNTS,
    acceptance_values,
    result_from_row,
    result_values,
)
from storage.store.states import due_again

Key = tuple[int, int]
"""(row_index, sample)"""
READ_PAGE = 500
"""Results held at a time while iterating."""

_STATISTICS = tuple(column for column in acceptance.c if column.name not in ("job_id", "row_index", "sample"))
_EMITTED = acceptance.c.num_output_tokens.label("num_emitted_tokens")


@dataclass(frozen=True, slots=True)
class ErrorGroup:
    """All the errors of one code in a job."""

    error_code: str
    num_errors: int
    first_row_index: int
    example_message: str | None


class _AlreadyRecorded(Exception):
    """A record of the batch is there already; `write_unrecorded` sorts it out."""


class Results(Room):
    @reads
    def recorded(self, connection: sa.Connection, chunk: Chunk) -> set[Key]:
        """The (row_index, sample) of a chunk that are finished: errors that are due again are not."""
        retry_epoch = connection.execute(sa.select(chunks.c.retry_epoch).where(chunks.c.id == chunk.id)).scalar()
        query = sa.select(results.c.row_index, results.c.sample).where(
            results.c.job_id == chunk.job_id,
            results.c.row_index >= chunk.start_row,
            results.c.row_index < chunk.start_row + chunk.num_rows,
        )
        if retry_epoch:
            query = query.where(sa.not_(due_again(retry_epoch)))
        return {(row.row_index, row.sample) for row in connection.execute(query)}

    def write(self, lease: Lease, batch: Sequence[Result]) -> int:
        """Record results of a chunk that is held under this lease; how many were new (first success wins).

        Nothing of the batch is written when this raises: `LeaseLost` when the chunk moved on, `InvalidResult` for
        statistics that do not add up or an error without a code, ValueError for a row that is not the chunk's.
        """
        if not batch:
            return 0
        try:
            return self.database.write(_write_all, lease, batch)
        except _AlreadyRecorded:
            return self.database.write(write_unrecorded, lease, batch)

    def iterate(self, job_id: str, *, page: int = READ_PAGE) -> Iterator[Result]:
        """All results by (row_index, sample), a page in memory at a time."""
        after = (-1, 0)
        while found := self.database.read(_page, job_id, after, page):
            yield from found
            after = (found[-1].row_index, found[-1].sample)

    @reads
    def errors(self, connection: sa.Connection, job_id: str, limit: int = 100) -> list[Result]:
        """The first errors of a job, in input order."""
        query = (
            _with_acceptance()
            .where(results.c.job_id == job_id, results.c.status == sa.literal_column("'error'"))
            .order_by(results.c.row_index, results.c.sample)
            .limit(limit)
        )
        return [result_from_row(row) for row in connection.execute(query)]

    @reads
    def error_groups(self, connection: sa.Connection, job_id: str) -> list[ErrorGroup]:
        """Errors by code, the most frequent first."""
        query = sa.text(
            "SELECT error_code, num_errors, first_row_index, example_message FROM job_errors"
            " WHERE job_id = :job_id ORDER BY num_errors DESC, error_code"
        )
        return [ErrorGroup(*row) for row in connection.execute(query, {"job_id": job_id})]


def _write_all(connection: sa.Connection, lease: Lease, batch: Sequence[Result]) -> int:
    """Insert a batch of which nothing is recorded yet: the usual case, with no look-up at all.

    Raises `LeaseLost`, `InvalidResult` and `_AlreadyRecorded`; nothing of the transaction may be kept then.
    """
    row = _chunk_of(connection, lease, batch)
    _insert(connection, row.job_id, lease.epoch, batch)
    _count_in(connection, lease.chunk_id, batch)
    return len(batch)


def write_unrecorded(connection: sa.Connection, lease: Lease, batch: Sequence[Result]) -> int:
    """Insert what is not recorded yet, replacing errors by successes and errors of before a retry; how many.

    A chunk's rows are written by none but the holder of its lock, so what is read here stays true until the commit.
    """
    row = _chunk_of(connection, lease, batch)
    new = {(result.row_index, result.sample): result for result in reversed(batch)}
    replaced: list[Any] = []
    for old in _recorded_between(connection, row.job_id, min(new)[0], max(new)[0]):
        result = new.get((old.row_index, old.sample))
        if result is None:
            continue
        newer = result.status is RowStatus.OK or old.epoch < row.retry_epoch
        if old.status is RowStatus.ERROR and newer:
            replaced.append(old)
        else:
            del new[old.row_index, old.sample]
    _delete(connection, row.job_id, replaced)
    _insert(connection, row.job_id, lease.epoch, list(new.values()))
    _count_in(connection, lease.chunk_id, new.values(), replaced)
    return len(new)


def _chunk_of(connection: sa.Connection, lease: Lease, batch: Iterable[Result]) -> Any:
    row = require_lease(connection, lease)
    end = row.start_row + row.num_rows
    for result in batch:
        if not (row.start_row <= result.row_index < end and 0 <= result.sample < row.num_samples):
            raise ValueError(
                f"(row {result.row_index}, sample {result.sample}) is not in chunk {lease.chunk_id} of job"
                f" {row.job_id}: rows {row.start_row} to {end - 1}, {row.num_samples} samples each"
            )
    return row


def _page(connection: sa.Connection, job_id: str, after: tuple[int, int], limit: int) -> list[Result]:
    """The next results after a (row_index, sample), in that order."""
    query = (
        _with_acceptance()
        .where(results.c.job_id == job_id, sa.tuple_(results.c.row_index, results.c.sample) > sa.tuple_(*after))
        .order_by(results.c.row_index, results.c.sample)
        .limit(limit)
    )
    return [result_from_row(row) for row in connection.execute(query)]


def _with_acceptance() -> sa.Select[Any]:
    statistics = (column for column in _STATISTICS if column.name != "num_output_tokens")
    return sa.select(*results.c, *statistics, _EMITTED).select_from(results).outerjoin(acceptance, SAME_RESULT)


def _recorded_between(connection: sa.Connection, job_id: str, first: int, last: int) -> Iterable[Any]:
    query = (
        sa.select(
            results.c.row_index,
            results.c.sample,
            results.c.status,
            results.c.epoch,
            results.c.num_output_tokens,
            results.c.draft_seconds,
            results.c.verify_seconds,
            *(sa.func.coalesce(acceptance.c[name], 0).label(name) for name in SPECULATION_COUNTS),
        )
        .outerjoin(acceptance, SAME_RESULT)
        .where(results.c.job_id == job_id, results.c.row_index.between(first, last))
    )
    return connection.execute(query)


def _delete(connection: sa.Connection, job_id: str, rows: Sequence[Any]) -> None:
    if not rows:
        return
    statement = sa.delete(results).where(
        results.c.job_id == sa.bindparam("job"),
        results.c.row_index == sa.bindparam("row"),
        results.c.sample == sa.bindparam("of"),
    )
    connection.execute(statement, [{"job": job_id, "row": row.row_index, "of": row.sample} for row in rows])


def _count_in(connection: sa.Connection, chunk_id: int, new: Iterable[Result], replaced: Iterable[Any] = ()) -> None:
    added = _counts([(result, result.acceptance) for result in new])
    taken = _counts([(old, old) for old in replaced])
    values = {name: chunks.c[name] + getattr(added, name) - getattr(taken, name) for name in COUNTS}
    connection.execute(sa.update(chunks).where(chunks.c.id == chunk_id).values(values))


def _counts(records: Sequence[tuple[Any, Any | None]]) -> Counts:
    """Sums over records, each given with its acceptance counts, if it has any."""
    stats = [counted for _, counted in records if counted is not None]
    num_ok = sum(record.status is RowStatus.OK for record, _ in records)
    seconds = ((record.draft_seconds or 0.0) + (record.verify_seconds or 0.0) for record, _ in records)
    return Counts(
        num_output_tokens=sum(record.num_output_tokens or 0 for record, _ in records),
        num_ok=num_ok,
        num_errors=len(records) - num_ok,
        engine_microseconds=sum(round(each * 1e6) for each in seconds),
        **{name: sum(getattr(each, name) for each in stats) for name in SPECULATION_COUNTS},
    )


def _insert(connection: sa.Connection, job_id: str, epoch: int, batch: Sequence[Result]) -> None:
    now: Any = datetime.now(UTC)
    if connection.dialect.name == "sqlite":
        now = now.strftime("%Y-%m-%d %H:%M:%S.%f")
    rows = [result_values(job_id, epoch, now, result) for result in batch]
    statistics = [
        acceptance_values(job_id, result.row_index, result.sample, result.acceptance)
        for result in batch
        if result.acceptance is not None
    ]
    try:
        _insert_rows(connection, "results", RESULT_COLUMNS, rows)
        _insert_rows(connection, "acceptance", ACCEPTANCE_COLUMNS, statistics)
    except (DataError, IntegrityError, psycopg.DataError, psycopg.IntegrityError) as error:
        cause = error.orig if isinstance(error, DBAPIError) else error
        if _is_duplicate(cause):
            raise _AlreadyRecorded from error
        raise InvalidResult(f"the database refuses a result of job {job_id}: {cause}") from error


def _is_duplicate(cause: object) -> bool:
    if isinstance(cause, sqlite3.IntegrityError):
        return cause.sqlite_errorcode in (sqlite3.SQLITE_CONSTRAINT_PRIMARYKEY, sqlite3.SQLITE_CONSTRAINT_UNIQUE)
    return isinstance(cause, psycopg.errors.UniqueViolation)


def _insert_rows(
    connection: sa.Connection, table: str, columns: Sequence[str], rows: Sequence[tuple[Any, ...]]
) -> None:
    if not rows:
        return
    names = ", ".join(columns)
    if connection.dialect.name == "sqlite":
        marks = ", ".join("?" * len(columns))
        connection.exec_driver_sql(f"INSERT INTO {table} ({names}) VALUES ({marks})", list(rows))
        return
    driver = connection.connection.driver_connection
    assert isinstance(driver, psycopg.Connection)
    with driver.cursor() as cursor, cursor.copy(f"COPY {table} ({names}) FROM STDIN") as copy:
        for row in rows:
            copy.write_row(row)
