"""What people do to a job: cancel it, resume it, have its errors tried again."""

from __future__ import annotations

from scheduler.daemon.recovery import as_it_stands
from scheduler.errors import WrongState
from scheduler.finishing import TOO_MANY_ERRORS
from storage.errors import InputChanged
from storage.files.changes import ADVICE, changes_since
from storage.records import Job, JobState
from storage.store.states import CLAIMABLE
from storage.store.store import Store

STOPPED = (JobState.CANCELLED, JobState.FAILED)


def cancel(store: Store, job_id: str) -> JobState:
    """Stop a job; its state afterwards: cancelling while chunks run, else cancelled. What is recorded stays.

    Cancelling twice is once. Raises `WrongState` for a job that ended otherwise.
    """
    job = as_it_stands(store, store.jobs.get(job_id))
    state = store.jobs.cancel(job.id)
    if state not in (JobState.CANCELLING, JobState.CANCELLED):
        raise WrongState(f"job {job.name!r} is {state} already: there is nothing to cancel")
    return state


def resume(store: Store, job_id: str) -> int:
    """Put the unfinished chunks of a stopped job back in line; returns how many. Those of an interrupted job, which
    nobody works on, are in line as soon as this looks at them.

    Raises `InputChanged`, and `WrongState` for a job that is not stopped or that was stopped for its errors.
    """
    job = as_it_stands(store, store.jobs.get(job_id))
    if job.state is JobState.CANCELLING:
        raise WrongState(_still_cancelling(store, job, "resume it"))
    if job.state is JobState.IN_PROGRESS and store.telemetry.activity(job.id).nobody:
        require_same_input(store, job)
        return sum(store.jobs.progress(job.id).chunks.get(state, 0) for state in CLAIMABLE)
    if job.state is JobState.COMPLETED:
        raise WrongState(f"job {job.name!r} is completed: nothing is left to resume")
    if job.state not in STOPPED:
        raise WrongState(f"job {job.name!r} is {job.state}: it goes on by itself")
    if job.error_code == TOO_MANY_ERRORS:
        raise WrongState(
            f"job {job.name!r} was stopped because {job.error_message}. Resuming would stop it again: once the cause is"
            f" gone, `nightdraft retry {job.name} --failed` generates the failed rows anew and then the rest"
        )
    require_same_input(store, job)
    return store.jobs.resume(job.id)


def retry(store: Store, job_id: str) -> int:
    """Have a job's recorded errors generated again, and a stopped job resumed with it; returns the chunks put in line.

    A success replaces the error, never the reverse. Raises `InputChanged`, and `WrongState` while the job is being
    cancelled.
    """
    job = as_it_stands(store, store.jobs.get(job_id))
    if job.state is JobState.CANCELLING:
        raise WrongState(_still_cancelling(store, job, "retry"))
    require_same_input(store, job)
    return store.jobs.retry_failed(job.id)


def require_same_input(store: Store, job: Job) -> None:
    """Raise `InputChanged`, with what was and what is, unless every input file is as it was at submission."""
    differences = [difference for file in store.jobs.files(job.id) for difference in changes_since(file)]
    if differences:
        raise InputChanged(
            f"the input of job {job.name!r} has changed since it was submitted:",
            differences,
            ADVICE,
        )


def _still_cancelling(store: Store, job: Job, then: str) -> str:
    held = store.telemetry.activity(job.id).num_chunks
    chunks = "1 chunk is" if held == 1 else f"{held} chunks are"
    return (
        f"job {job.name!r} is being cancelled, and {chunks} in the hands of workers: wait until it is cancelled (within"
        f" {job.spec.lease_seconds:g} s, even if they died), then {then}"
    )
