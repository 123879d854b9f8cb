"""Taking chunks back from workers that died or fell silent."""

from __future__ import annotations

import logging

from scheduler.finishing import finish_if_done
from storage.errors import StoreUnavailable
from storage.records import Job, JobState
from storage.store.reaping import Reaped
from storage.store.store import Store

log = logging.getLogger(__name__)


def reap(store: Store, job_id: str | None = None) -> Reaped:
    """Reap what has expired, of one job or of all, and say in the log what became of it."""
    reaped = store.reaper.reap(job_id=job_id)
    for chunk in reaped.released:
        log.warning(
            "chunk %d of job %s: its lease ran out (%d so far); it goes out again",
            chunk.id,
            chunk.job_id,
            chunk.attempts,
        )
    for chunk in reaped.suspected:
        log.warning("chunk %d of job %s loses its workers: its rows run one at a time", chunk.id, chunk.job_id)
    for row in reaped.poisoned:
        log.error("row %d of job %s killed its worker again and again: recorded as an error", row.row_index, row.job_id)
    for failed in reaped.failed:
        log.error("job %s was ended: its workers die before they have a row in their hands", failed)
    return reaped


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
