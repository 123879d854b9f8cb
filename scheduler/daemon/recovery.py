"""Taking chunks back from workers that died or fell silent."""

from __future__ import annotations

import logging

from scheduler.finishing import finish_if_done
from storage.errors import StoreUnavailable
from storage.records import Job, JobState
from storage.retry import complain
from storage.store.reaping import Reaped
from storage.store.store import Store

log = logging.getLogger(__name__)

AGAIN = "rows that a process left behind when it was killed or failed are generated again; what was recorded stays"
ONE_BY_ONE = "rows that were in hand at every failure are run one at a time, to find the one that causes it"


def reap(store: Store, job_id: str) -> Reaped:
    """Take back what has expired of one job, and say in the log what became of it."""
    reaped = store.reaper.reap(job_id=job_id)
    if reaped != Reaped():
        _tell(reaped, store.jobs.get(job_id).name)
    return reaped


def _tell(reaped: Reaped, job: str) -> None:
    """What is to be expected after a kill or a failure is said now and then; what it cost, each time."""
    for chunk in reaped.released:
        log.info("job %s: chunk %d lost its worker, %d so far; it goes out again", job, chunk.id, chunk.attempts)
    if reaped.released:
        complain(log, f"job {job}: {AGAIN}")
    if reaped.suspected:
        complain(log, f"job {job}: {ONE_BY_ONE}")
    for row in reaped.poisoned:
        log.error(
            "job %s: row %d was in hand each time a worker died or failed: recorded as an error", job, row.row_index
        )
    if reaped.failed:
        log.error("job %s was ended: its workers die before they have a row in their hands", job)


def as_it_stands(store: Store, job: Job) -> Job:
    """The job once what the dead held of it is taken back, and ended if nothing of it is left to do.

    What every command does before it acts on a job: nobody else may be there to do it.
    """
    if job.state is JobState.COMPLETED or store.read_only:
        return job
    store.reaper.expire_dead_workers()
    store.reaper.reap(job_id=job.id)
    return finish_if_done(store, job)


def as_seen(store: Store, job: Job) -> Job:
    """`as_it_stands` for those who only look: a store that cannot be written (a copy, a standby) is seen as it is."""
    try:
        return as_it_stands(store, job)
    except StoreUnavailable as error:
        log.info("what dead workers hold of job %s stays with them: %s", job.name, error)
        return job
