"""What happens to chunks whose lease ran out: again, then in halves, until the poison row is alone and recorded."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

import sqlalchemy as sa

from storage import jobs as job_statements
from storage import results as result_statements
from storage.chunks import STOPPING, UNLEASED, chunk_from_row, due_again
from storage.database import clock
from storage.records import Chunk, ChunkState, Result, RowStatus
from storage.tables import chunks, jobs, results

WORKER_CRASHED = "worker_crashed"
"""Error code of a row that was in the hands of a worker each time it died.

Its record has neither row_id nor carried columns: who reaps has the store, and perhaps not the input. An export has
them, since it reads the input again.
"""


class PoisonedRow(NamedTuple):
    job_id: str
    row_index: int


@dataclass(slots=True)
class Reaped:
    released: list[Chunk] = field(default_factory=list)
    """Chunks that are pending again, as they are now."""
    split: list[Chunk] = field(default_factory=list)
    """The parts, pending, of chunks that were split."""
    poisoned: list[PoisonedRow] = field(default_factory=list)
    """Rows that were given up and have an error recorded."""
    cancelled: list[int] = field(default_factory=list)
    """Ids of expired chunks of jobs that are being stopped."""


def expired(connection: sa.Connection, now: datetime | None, job_id: str | None = None) -> dict[str, list[int]]:
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


def reap_job(
    connection: sa.Connection, job_id: str, chunk_ids: list[int], now: datetime | None, max_attempts: int
) -> Reaped:
    """Take the expired ones of these chunks from their workers. See `Store.reap`."""
    reaped = Reaped()
    state = job_statements.lock(connection, job_id)
    spec = connection.execute(sa.select(jobs.c.spec).where(jobs.c.id == job_id)).scalar_one()
    limit = max(int(spec.get("max_attempts") or max_attempts), 1)
    for chunk_id in chunk_ids:
        row = _lock_expired(connection, chunk_id, now)
        if row is None:
            continue
        if state in STOPPING:
            _update(connection, row, state=ChunkState.CANCELLED)
            reaped.cancelled.append(chunk_id)
        elif row.attempts + 1 < limit:
            reaped.released.append(_update(connection, row, state=ChunkState.PENDING))
        else:
            _suspect(connection, row, limit, reaped)
    return reaped


def _suspect(connection: sa.Connection, row: Any, limit: int, reaped: Reaped) -> None:
    """A chunk whose worker died `limit` times: done if all is recorded, given up if one row, else split."""
    unfinished = _unfinished_rows(connection, row)
    if not unfinished:
        _update(connection, row, state=ChunkState.DONE)
    elif row.num_rows == 1:
        _give_up(connection, row, limit)
        reaped.poisoned.append(PoisonedRow(row.job_id, row.start_row))
    else:
        reaped.split += _split(connection, row, unfinished, limit)


def _split(connection: sa.Connection, row: Any, unfinished: list[int], limit: int) -> list[Chunk]:
    """Cut a chunk so that each part has half of its unfinished rows; the first part keeps the chunk's id.

    One more death splits a part again, but a row that is alone gets all its attempts: it may only have been in bad
    company.
    """
    if len(unfinished) > 1:
        cut = unfinished[len(unfinished) // 2]
    else:
        cut = unfinished[0] if unfinished[0] > row.start_row else unfinished[0] + 1
    head, tail = cut - row.start_row, row.start_row + row.num_rows - cut
    counts = result_statements.counts_between(connection, row.job_id, cut, row.start_row + row.num_rows)
    first = _update(
        connection,
        row,
        state=ChunkState.PENDING,
        num_rows=head,
        attempts=0 if head == 1 else limit - 1,
        **{name: chunks.c[name] - count for name, count in counts.items()},
    )
    values = {
        "job_id": row.job_id,
        "index": _next_index(connection, row.job_id),
        "file_index": row.file_index,
        "start_row": cut,
        "file_row": row.file_row + head,
        "num_rows": tail,
        "state": ChunkState.PENDING,
        "epoch": row.epoch + 1,
        "attempts": 0 if tail == 1 else limit - 1,
        "retry_epoch": row.retry_epoch,
        **counts,
    }
    inserted = connection.execute(sa.insert(chunks).values(values).returning(*chunks.c)).one()
    return [first, chunk_from_row(inserted)]


def _give_up(connection: sa.Connection, row: Any, limit: int) -> None:
    """Record an error for every sample of the one row that has no record, and call the chunk done."""
    message = f"the worker died or went silent {limit} times with this row in its hands"
    batch = [
        Result(row.start_row, sample, RowStatus.ERROR, error_code=WORKER_CRASHED, error_message=message)
        for sample in range(row.num_samples)
    ]
    result_statements.write_unrecorded(connection, row.id, row.epoch, batch)
    _update(connection, row, state=ChunkState.DONE)


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
    changed = {"attempts": chunks.c.attempts + 1, **UNLEASED, **values}
    statement = sa.update(chunks).where(chunks.c.id == row.id).values(changed).returning(*chunks.c)
    return chunk_from_row(connection.execute(statement).one())


def _next_index(connection: sa.Connection, job_id: str) -> int:
    query = sa.select(sa.func.max(chunks.c.index)).where(chunks.c.job_id == job_id)
    return int(connection.execute(query).scalar_one()) + 1


def _or_now(connection: sa.Connection, now: datetime | None) -> Any:
    return clock(connection) if now is None else now
