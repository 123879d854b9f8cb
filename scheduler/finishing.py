"""When a job ends: everything recorded, or too many errors to be worth going on."""

from __future__ import annotations

from storage.records import Job
from storage.store.store import Store

MIN_RESULTS = 100
"""max_error_rate is not looked at before this many results (or all of a smaller job) are final."""

TOO_MANY_ERRORS = "max_error_rate"
"""Error code of a job that was stopped for its share of errors."""


def finish_if_done(store: Store, job: Job) -> Job:
    """The job as it now stands: stopped if its errors are too many, completed or cancelled if nothing is left to do.

    The daemon and the in-process run both call this now and then.
    """
    if not stop_if_hopeless(store, job) and store.jobs.is_settled(job.id):
        store.jobs.finalize_if_done(job.id)
    return store.jobs.get(job.id)


def stop_if_hopeless(store: Store, job: Job) -> bool:
    """Fail a running job whose share of errors exceeds its `max_error_rate`; returns whether that happened.

    Only finished chunks count: their errors are final, while those of a chunk under retry may still turn into answers.
    """
    limit = job.spec.max_error_rate
    if limit is None:
        return False
    done = store.jobs.done_counts(job.id)
    recorded = done.num_ok + done.num_errors
    if recorded < min(MIN_RESULTS, job.num_rows * job.num_samples) or done.num_errors <= limit * recorded:
        return False
    message = (
        f"{done.num_errors} of the first {recorded} results are errors, more than max_error_rate {limit} allows;"
        f" `nightdraft errors {job.name} --group` shows which"
    )
    return store.jobs.fail(job.id, TOO_MANY_ERRORS, message)
