"""How far a job is: sums over its chunks' counters, however many rows it has."""

from __future__ import annotations

import sqlalchemy as sa

from storage.errors import UnknownJob
from storage.records import ChunkState, JobProgress
from storage.sql.tables import chunks, jobs
from storage.store.results import Counts


def of_job(connection: sa.Connection, job_id: str) -> JobProgress:
    sums = [sa.func.sum(chunks.c[name]).label(name) for name in Counts.__slots__]
    query = sa.select(chunks.c.state, sa.func.count().label("chunks"), *sums).where(chunks.c.job_id == job_id)
    size = connection.execute(sa.select(jobs.c.num_rows, jobs.c.num_samples).where(jobs.c.id == job_id)).one_or_none()
    if size is None:
        raise UnknownJob(f"no job has the id {job_id!r}")
    rows = connection.execute(query.group_by(chunks.c.state)).all()
    counts = dict.fromkeys(ChunkState, 0) | {row.state: row.chunks for row in rows}
    totals = {name: int(sum(getattr(row, name) for row in rows)) for name in Counts.__slots__}
    return JobProgress(num_results=size.num_rows * size.num_samples, chunks=counts, **totals)
