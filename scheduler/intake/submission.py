"""From a spec and a dataset to a job in the store; the same name with the same content is the same job."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from scheduler.differences import spec_differences, spec_hash
from scheduler.errors import SpecChanged
from scheduler.finishing import finish_if_done
from scheduler.intake.dataset import Dataset
from scheduler.intake.naming import check_name, new_job_id, next_free_name
from scheduler.intake.planning import plan_chunks
from scheduler.lifecycle import STOPPED, resume
from storage.errors import InputChanged, JobExists
from storage.files.changes import changes
from storage.records import Chunk, Job, JobState
from storage.spec import JobSpec
from storage.store.store import Store

OTHERWISE = "Submit what it was submitted with to resume it, or choose another --name, or --new for a fresh job."


@dataclass(frozen=True, slots=True)
class Submission:
    job: Job
    resumed: bool
    """The job was there before, with the same spec and input."""


def submit(
    store: Store,
    spec: JobSpec,
    dataset: Dataset,
    *,
    new: bool = False,
    defaults: JobSpec | None = None,
) -> Submission:
    """Store a job with all its chunks, or find the one that it repeats.

    A job of the same name, spec and input is resumed: a cancelled or failed one is opened again, a running or
    completed one is returned as it is. `new` makes a fresh job under the first free of NAME, NAME-2, NAME-3, ...
    `defaults` has every field of the sections `engine` and `sampling`: what a job means that was stored before a field
    existed.
    The columns that inspection settled on become part of the stored spec. A dataset without rows completes at once.

    Raises `InvalidJob`, `SpecChanged`, `InputChanged`, and `WrongState` for a job that is being cancelled or that was
    stopped for its errors.
    """
    name = check_name(spec.name or "")
    spec = replace(spec, input=replace(dataset.input, paths=spec.input.paths))
    while True:
        existing = store.jobs.find(name)
        if existing is not None and not new:
            return Submission(_rejoined(store, existing, spec, dataset, defaults), resumed=True)
        try:
            return Submission(_created(store, replace(spec, name=next_free_name(store, name)), dataset), resumed=False)
        except JobExists:
            continue  # someone else took the name in this moment: look again


def _created(store: Store, spec: JobSpec, dataset: Dataset) -> Job:
    job = Job(
        id=new_job_id(),
        name=str(spec.name),
        state=JobState.QUEUED,
        spec=spec,
        spec_hash=spec_hash(spec),
        num_rows=dataset.num_rows,
        num_samples=spec.num_samples,
        created_at=datetime.now(UTC),
        notes=dataset.notes,
    )
    store.jobs.create(job, dataset.files, _chunks(job, dataset))
    return job if dataset.num_rows else finish_if_done(store, job)


def _chunks(job: Job, dataset: Dataset) -> Iterator[Chunk]:
    return (replace(chunk, job_id=job.id) for chunk in plan_chunks(dataset, job.spec.chunk_rows))


def _rejoined(store: Store, job: Job, spec: JobSpec, dataset: Dataset, defaults: JobSpec | None) -> Job:
    if changed := spec_differences(job.spec, spec, defaults):
        raise SpecChanged(f"job {job.name!r} exists with another spec:", changed, OTHERWISE)
    if changed := changes(store.jobs.files(job.id), dataset.files):
        raise InputChanged(f"the input of job {job.name!r} has changed since it was submitted:", changed, OTHERWISE)
    if job.state in (*STOPPED, JobState.CANCELLING):
        resume(store, job.id)
        return store.jobs.get(job.id)
    return job
