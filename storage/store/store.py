"""The store: every statement that the other packages may make, on SQLite or PostgreSQL, safe to call from threads.

Synchronous: async code calls it through `anyio.to_thread.run_sync`. Every method is one short transaction. After a lost
connection, a deadlock, a read-only phase or a busy database a method tries again until `patience` seconds are over, and
then raises `StoreUnavailable`; `StoreFull` and `StoreFailed` come at once. Errors of the drivers stay inside.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, Self

from storage.errors import NoStore
from storage.processes import ProcessIdentity, has_ended, this_process
from storage.records import Chunk, ChunkState, InputFile, Job, JobProgress, JobState, Result, RowInHand
from storage.sql import revisions, sessions
from storage.sql.database import Database, shown
from storage.store import chunks, jobs, lifecycle, progress, reading, reaping, results, scheduling, telemetry
from storage.store.chunks import Heartbeat
from storage.store.reading import ErrorGroup
from storage.store.reaping import Reaped
from storage.store.scheduling import DoneCounts
from storage.store.telemetry import Activity, EngineSample, WorkerInfo

DEFAULT_URL = "sqlite:///nightdraft.db"
READ_PAGE = 500
"""Results held at a time while iterating."""


class Store:
    """Jobs, chunks, results and statistics in one database. Open it with `Store.open`; a context manager."""

    def __init__(self, url: str = DEFAULT_URL, *, patience: float = 60.0) -> None:
        """Connect lazily, without a look at the schema. Raises `InvalidStore` for an unusable URL."""
        self.database = Database(url, patience=patience)
        self.url = shown(self.database.url)
        """For messages: without passwords."""

    @classmethod
    def open(cls, url: str = DEFAULT_URL, *, patience: float = 60.0, create: bool = True) -> Self:
        """Connect, setting up a new SQLite file or an empty PostgreSQL database (or schema) if `create`.

        Raises `NoStore` where nothing is there and nothing may be set up, `InvalidStore` for a URL or a file that is no
        store, `StoreUnavailable` when the database does not answer and `SchemaOutdated` when it needs an upgrade.
        """
        store = cls(url, patience=patience)
        try:
            if store.database.has_no_file or store.database.read_once(revisions.is_empty):
                if not create:
                    raise NoStore(
                        f"there is no store {store.url} yet: `nightdraft run` and `nightdraft submit` make it,"
                        " --store or NIGHTDRAFT_STORE names another"
                    )
                store.database.write_once(revisions.upgrade_if_empty)
            store.database.read_once(revisions.require_head, store.url)
        except BaseException:
            store.dispose()
            raise
        return store

    def upgrade(self) -> None:
        """Bring the schema to the revision of this version."""
        self.database.write_once(revisions.upgrade)

    @property
    def read_only(self) -> bool:
        """Whether the store can only be looked at here: an SQLite file on a medium that cannot be written."""
        return self.database.read_only

    def dispose(self) -> None:
        """Close every connection."""
        self.database.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.dispose()

    # Jobs

    def create_job(self, job: Job, files: Sequence[InputFile], chunks: Iterable[Chunk]) -> None:
        """Insert a job, its files and its chunks in one transaction, streaming the chunks.

        Raises `JobExists` for a name that is taken and `InvalidPlan` for chunks that do not cover the rows in order.
        """
        self.database.write_once(jobs.create, job, files, chunks)

    def get_job(self, reference: str) -> Job:
        """The job with that id, name or unique id prefix, or the newest one for "last". Raises `UnknownJob`."""
        return self.database.read(jobs.get, reference)

    def find_job(self, name: str) -> Job | None:
        """The job of exactly that name."""
        return self.database.read(jobs.find_by_name, name)

    def list_jobs(self, limit: int = 50) -> list[Job]:
        """The newest jobs, newest first."""
        return self.database.read(jobs.list_newest, limit)

    def unfinished_jobs(self) -> list[Job]:
        """Jobs that have not ended, oldest first."""
        return self.database.read(scheduling.unfinished_jobs)

    def input_files(self, job_id: str) -> list[InputFile]:
        return self.database.read(jobs.files_of, job_id)

    def progress(self, job_id: str) -> JobProgress:
        """Counts over the whole job, exact and cheap at any size."""
        return self.database.read(progress.of_job, job_id)

    def done_counts(self, job_id: str) -> DoneCounts:
        """Successes and errors in the job's finished chunks."""
        return self.database.read(scheduling.done_counts, job_id)

    def is_settled(self, job_id: str) -> bool:
        """Whether none of the job's chunks waits or runs: the time to call `finalize_if_done`."""
        return self.database.read(scheduling.is_settled, job_id)

    def set_job_state(
        self,
        job_id: str,
        state: JobState,
        *,
        expected: Collection[JobState] | None = None,
        error_code: str | None = None,
        error_message: str | None = None,
    ) -> bool:
        """Move a job to `state` if it is in one of `expected` (None: in any); whether it was moved."""
        return self.database.write(jobs.set_state, job_id, state, expected, error_code, error_message)

    def cancel_job(self, job_id: str) -> JobState:
        """Stop a job: CANCELLING while chunks run, else CANCELLED. A job that has ended keeps its state."""
        return self.database.write(lifecycle.cancel, job_id)

    def fail_job(self, job_id: str, error_code: str, error_message: str) -> bool:
        """Stop a job as FAILED; False when it had ended or was being stopped already."""
        return self.database.write(lifecycle.fail, job_id, error_code, error_message)

    def resume_job(self, job_id: str) -> int:
        """Queue a stopped job again; how many chunks that reopens."""
        return self.database.write(lifecycle.resume, job_id)

    def retry_failed(self, job_id: str) -> int:
        """Have recorded errors generated again; how many chunks that reopens. Raises `JobStopped` while cancelling."""
        return self.database.write(lifecycle.retry_failed, job_id)

    def finalize_if_done(self, job_id: str) -> Job | None:
        """End a job of which nothing is left to do: the job if it has ended (now or before), else None."""
        return self.database.write(lifecycle.finalize_if_done, job_id)

    # Chunks

    def list_chunks(self, job_id: str, states: Collection[ChunkState] = tuple(ChunkState)) -> list[Chunk]:
        """The job's chunks in these states, in row order."""
        return self.database.read(chunks.of_job, job_id, states)

    def pending_chunks(self, job_id: str | None = None, limit: int = 100) -> list[Chunk]:
        """Chunks that wait for dispatch, of queued and running jobs, oldest first."""
        return self.database.read(chunks.pending, job_id, limit)

    def mark_dispatched(self, chunk_ids: Sequence[int]) -> int:
        """Pending chunks become dispatched; how many were still pending."""
        return self.database.write(chunks.mark_dispatched, chunk_ids)

    def requeue_stale_dispatched(self, older_than: float) -> int:
        """Chunks dispatched over `older_than` seconds ago and not claimed become pending; how many."""
        return self.database.write(chunks.requeue_stale, older_than)

    def count_dispatched(self) -> int:
        """Chunks that are dispatched and not claimed, over all jobs."""
        return self.database.read(scheduling.count_dispatched)

    def claim(
        self, chunk_id: int, epoch: int, worker_id: str, lease_seconds: float, job_id: str | None = None
    ) -> Chunk | None:
        """Take the chunk of a message and raise its epoch; None when the message is a duplicate or stale, or names a
        chunk of another job."""
        return self.database.write(chunks.claim, chunk_id, epoch, worker_id, lease_seconds, job_id)

    def claim_next(self, worker_id: str, lease_seconds: float, job_id: str | None = None) -> Chunk | None:
        """Take the oldest chunk that nobody runs; None when there is none."""
        return self.database.write(chunks.claim_next, worker_id, lease_seconds, job_id)

    def heartbeat(self, chunk_id: int, epoch: int, lease_seconds: float) -> Heartbeat:
        """Extend a lease; says whether it is still held and whether the job was stopped."""
        return self.database.write(chunks.heartbeat, chunk_id, epoch, lease_seconds)

    def release(self, chunk_id: int, epoch: int) -> None:
        """Give a chunk back without counting an attempt; nothing when the lease is lost already."""
        self.database.write(chunks.release, chunk_id, epoch)

    def take_in_hand(self, chunk_id: int, epoch: int, row: RowInHand) -> None:
        """Note the row that is about to run alone, so that `reap` can name it. Raises `LeaseLost`."""
        self.database.write(chunks.take_in_hand, chunk_id, epoch, row)

    def expire_leases(self, worker_id: str) -> int:
        """Let the leases of a worker that is known to be dead end now; how many. `reap` does the rest."""
        return self.database.write(chunks.expire_leases, worker_id)

    def expire_dead_workers(self) -> int:
        """Let the leases of workers end that ran here, among the processes that this one sees, and run no more; how
        many. A worker anywhere else is dead when it has been silent for a lease."""
        observer = this_process()
        expired = 0
        for worker in self.list_workers():
            if has_ended(worker.process, observer):
                expired += self.expire_leases(worker.worker_id)
                self.worker_gone(worker.worker_id)
        return expired

    def finish(self, chunk_id: int, epoch: int) -> bool:
        """Mark a chunk done; False when the lease is lost. Raises `ChunkIncomplete` when a record is missing."""
        return self.database.write(chunks.finish, chunk_id, epoch)

    def jobs_with_expired_leases(self) -> list[str]:
        """Ids of the jobs of which `reap` would find something."""
        return list(self.database.read(reaping.expired, None))

    def reap(self, now: datetime | None = None, max_attempts: int = 3, job_id: str | None = None) -> Reaped:
        """Take the chunks (of one job, or of all) whose lease ended before `now` (None: the store's clock).

        Each goes back to pending with one more attempt; one attempt before `max_attempts` (the job's own, where its
        spec has one) it is under suspicion, and its rows run one at a time. The row that was then in hand is given up,
        with the error "worker_crashed" recorded. See `storage.store.reaping`.
        """
        reaped = Reaped()
        expired = self.database.read(reaping.expired, now, job_id)
        if expired and not self.database.is_sqlite:
            self.database.read(sessions.end_frozen)
        for job, ids in expired.items():
            part = self.database.write(reaping.reap_job, job, ids, now, max_attempts)
            reaped.released += part.released
            reaped.suspected += part.suspected
            reaped.poisoned += part.poisoned
            reaped.cancelled += part.cancelled
            reaped.failed += part.failed
        return reaped

    # Results

    def recorded(self, chunk: Chunk) -> set[tuple[int, int]]:
        """The finished (row_index, sample) of a chunk; errors that a retry generates again do not count."""
        return self.database.read(results.recorded, chunk)

    def write_results(self, chunk_id: int, epoch: int, batch: Sequence[Result]) -> int:
        """Record results of a chunk that runs under this epoch; how many were new (first success wins).

        Nothing of the batch is written when this raises: `LeaseLost` when the chunk moved on, `InvalidResult` for
        statistics that do not add up or an error without a code, ValueError for a row that is not the chunk's.
        """
        if not batch:
            return 0
        try:
            return self.database.write(results.write_all, chunk_id, epoch, batch)
        except results.AlreadyRecorded:
            return self.database.write(results.write_unrecorded, chunk_id, epoch, batch)

    def iter_results(self, job_id: str, *, page: int = READ_PAGE) -> Iterator[Result]:
        """All results by (row_index, sample), a page in memory at a time."""
        after = (-1, 0)
        while found := self.database.read(reading.page, job_id, after, page):
            yield from found
            after = (found[-1].row_index, found[-1].sample)

    def errors(self, job_id: str, limit: int = 100) -> list[Result]:
        """The first errors of a job, in input order."""
        return self.database.read(reading.errors, job_id, limit)

    def error_groups(self, job_id: str) -> list[ErrorGroup]:
        """Errors by code, the most frequent first."""
        return self.database.read(reading.error_groups, job_id)

    # What ran

    def write_engine_samples(self, samples: Sequence[EngineSample]) -> None:
        """Append readings of an engine's gauges; one per worker and time."""
        self.database.write(telemetry.write_engine_samples, samples)

    def latest_engine_samples(self) -> list[EngineSample]:
        """The newest reading of each worker that has not signed off."""
        return self.database.read(telemetry.latest_engine_samples)

    def worker_seen(self, worker_id: str, process: ProcessIdentity, job_id: str | None = None) -> None:
        """Note that a worker lives, and which job it works on (None: any)."""
        self.database.write(telemetry.worker_seen, worker_id, process, job_id)

    def worker_gone(self, worker_id: str) -> None:
        """Sign a worker off."""
        self.database.write(telemetry.worker_gone, worker_id)

    def list_workers(self) -> list[WorkerInfo]:
        """Workers that reported themselves and did not sign off, the last seen first."""
        return self.database.read(telemetry.list_workers)

    def activity(self, job_id: str) -> Activity:
        """Who works on a job now."""
        return self.database.read(telemetry.activity, job_id)

    def record_model(
        self,
        job_id: str,
        role: str,
        name: str,
        content_hash: str,
        *,
        parameters: Mapping[str, Any],
        report: Mapping[str, Any],
    ) -> None:
        """Note a model that worked on a job ("target" or "draft"); once per (job, role, name, hash)."""
        self.database.write(telemetry.record_model, job_id, role, name, content_hash, parameters, report)

    def record_speculator(self, job_id: str, method: str, verify: str, *, parameters: Mapping[str, Any]) -> None:
        """Note a speculator that worked on a job; once per (job, method, verification rule)."""
        self.database.write(telemetry.record_speculator, job_id, method, verify, parameters)

    def models(self, job_id: str) -> list[dict[str, Any]]:
        """The models that worked on a job, the target first."""
        return self.database.read(telemetry.models_of, job_id)

    def speculators(self, job_id: str) -> list[dict[str, Any]]:
        """The speculators that worked on a job."""
        return self.database.read(telemetry.speculators_of, job_id)
