"""One chunk from claim to done: read, prepare, generate, record. The same for Celery tasks and the in-process run."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from storage.errors import LeaseLost
from storage.records import Chunk, Job
from storage.store import Store
from workers.engine.errors import EngineStopped, InvalidConfig, ModelNotFound, UnsupportedModel
from workers.engine.request import Completion, FinishReason, Request
from workers.engine.sampling_params import SamplingParams
from workers.errors import EngineFailed, GaveUp, InvalidSpec, UnreadableInput
from workers.host import EngineHost, Session
from workers.hosts import EngineHosts
from workers.lease import LeaseKeeper
from workers.patience import STORE_OUT_OF_REACH, patiently
from workers.prepare import PreparedRow, Preparer, RejectedRow
from workers.pulse import record_what_runs
from workers.results import ResultWriter, result_of, results_of_rejected
from workers.rows import Row, read_chunk
from workers.settings import JobSettings

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
"""How soon a chunk that waits for completions notices a stop, a cancelled job or a lost lease."""


class ChunkStatus(StrEnum):
    DONE = "done"
    """Every (row, sample) has a record."""
    RELEASED = "released"
    """The worker is stopping: what finished is recorded, the rest waits for another worker."""
    CANCELLED = "cancelled"
    """The job is being cancelled: what finished is recorded."""
    LOST = "lost"
    """The lease went to somebody else; nothing more was written."""
    FAILED = "failed"
    """The engine broke: what finished is recorded, the rest is tried again and the attempt counts."""
    JOB_FAILED = "job_failed"
    """Nothing of this job can run (no such model, unreadable input): the job was ended."""


@dataclass(frozen=True, slots=True)
class ChunkOutcome:
    status: ChunkStatus
    num_ok: int = 0
    """Results of this run, recorded."""
    num_errors: int = 0
    error: str | None = None


def process_chunk(
    store: Store, hosts: EngineHosts, job: Job, chunk: Chunk, *, worker_id: str, stop: threading.Event
) -> ChunkOutcome:
    """Process a claimed chunk until it is done, `stop` is set, its job is stopped, its lease lost, or the engine fails.

    What finished before is recorded, in batches while the chunk runs, unless the lease is lost. Any other error is
    raised; the lease then runs out, and the scheduler counts the attempt.
    """
    try:
        settings = JobSettings.from_job(job)
    except InvalidSpec as error:
        _fail_job(store, job, "invalid_spec", str(error))
        store.release(chunk.id, chunk.epoch)
        return ChunkOutcome(ChunkStatus.JOB_FAILED, error=str(error))
    with LeaseKeeper(store, chunk, settings.lease_seconds) as lease:
        run = _ChunkRun(store, hosts, job, chunk, settings, lease, stop)
        outcome = run.outcome(worker_id)
    if outcome.status is ChunkStatus.FAILED:
        # A lease that has run out is what the reaper counts as an attempt; a release would not count.
        patiently(lambda: store.heartbeat(chunk.id, chunk.epoch, 0.0), stop.is_set)
    logger.info(
        "chunk %d of job %s: %s, %d ok, %d errors",
        chunk.id, job.name, outcome.status, outcome.num_ok, outcome.num_errors,
    )  # fmt: skip
    return outcome


class _Interrupted(Exception):
    """The chunk has to end now; the status says why."""

    def __init__(self, status: ChunkStatus) -> None:
        super().__init__(status)
        self.status = status


class _ChunkRun:
    def __init__(
        self,
        store: Store,
        hosts: EngineHosts,
        job: Job,
        chunk: Chunk,
        settings: JobSettings,
        lease: LeaseKeeper,
        stop: threading.Event,
    ) -> None:
        self.writer = ResultWriter(store, chunk, lambda: lease.lost)
        self._store = store
        self._hosts = hosts
        self._job = job
        self._chunk = chunk
        self._settings = settings
        self._lease = lease
        self._stop = stop
        self._open: dict[Hashable, tuple[Row, SamplingParams]] = {}
        self._recorded: set[tuple[int, int]] = set()

    def outcome(self, worker_id: str) -> ChunkOutcome:
        """Run, and end in the way that what happened asks for."""
        try:
            self._run()
            self.writer.flush()
            done = patiently(lambda: self._store.finish(self._chunk.id, self._chunk.epoch), self._given_up)
            return self._ended(ChunkStatus.DONE if done else ChunkStatus.LOST)
        except _Interrupted as interruption:
            return self._released(interruption.status)
        except EngineFailed as error:
            logger.error("chunk %d: the engine failed", self._chunk.id, exc_info=error)
            return self._failed(str(error))
        except (ModelNotFound, UnsupportedModel, InvalidConfig) as error:
            return self._job_failed(error.code, f"worker {worker_id}: {error}")
        except InvalidSpec as error:
            return self._job_failed("invalid_spec", str(error))
        except UnreadableInput as error:
            return self._job_failed("unreadable_input", f"worker {worker_id}: {error}")
        except LeaseLost:
            return ChunkOutcome(ChunkStatus.LOST)
        except STORE_OUT_OF_REACH as error:
            return ChunkOutcome(ChunkStatus.LOST, error=f"the store was out of reach: {error}")

    def _run(self) -> None:
        chunk, num_samples = self._chunk, self._settings.num_samples
        self._recorded = patiently(lambda: self._store.recorded(chunk), self._given_up)
        if len(self._recorded) == chunk.num_rows * num_samples:
            return
        files = patiently(lambda: self._store.input_files(chunk.job_id), self._given_up)
        file = {file.index: file for file in files}[chunk.file_index]
        rows = read_chunk(file, chunk, self._settings.input)
        try:
            with self._hosts.use(self._settings.engine, self._given_up) as host:
                record_what_runs(self._store, chunk.job_id, host)
                self._generate(host, rows)
        except GaveUp:
            self._check()
            raise

    def _generate(self, host: EngineHost, rows: Iterator[list[Row]]) -> None:
        requests = self._requests(host, rows)
        session = host.session()
        try:
            self._pump(session, requests)
        finally:
            for completion in session.close():
                self._record(completion)

    def _pump(self, session: Session, requests: Iterator[list[Request]]) -> None:
        """Keep the session full until every request is answered; record answers as they come."""
        ready: deque[Request] = deque()
        exhausted = False
        while True:
            self._check()
            while not exhausted and len(ready) < session.room:
                batch = next(requests, None)
                exhausted = batch is None
                ready.extend(batch or ())
            if ready and (session.room >= session.refill or not session.in_flight):
                session.send([ready.popleft() for _ in range(min(session.room, len(ready)))])
            if not session.in_flight:
                return
            for completion in session.receive(_POLL_SECONDS):
                if not self._record(completion):
                    raise EngineFailed(completion.error_message or "the engine aborted a request that nobody aborted")
            self.writer.flush_if_due()

    def _requests(self, host: EngineHost, rows: Iterator[list[Row]]) -> Iterator[list[Request]]:
        """Requests of the rows without a record, a batch of rows at a time; bad rows are recorded on the way."""
        preparer = Preparer(self._settings, host.tokenizer, host.max_model_len)
        for batch in rows:
            missing = {row.index: samples for row in batch if (samples := self._missing(row))}
            requests: list[Request] = []
            for prepared in preparer.prepare([row for row in batch if row.index in missing]):
                samples = missing[prepared.row.index]
                if isinstance(prepared, RejectedRow):
                    for result in results_of_rejected(prepared, samples):
                        self.writer.add(result)
                else:
                    requests.extend(self._opened(prepared, samples))
            self.writer.flush_if_due()
            yield requests

    def _opened(self, prepared: PreparedRow, samples: list[int]) -> list[Request]:
        requests = prepared.requests((self._chunk.id, self._chunk.epoch), samples, self._settings.seed)
        for request in requests:
            self._open[request.id] = (prepared.row, request.params)
        return requests

    def _missing(self, row: Row) -> list[int]:
        return [s for s in range(self._settings.num_samples) if (row.index, s) not in self._recorded]

    def _record(self, completion: Completion) -> bool:
        """Hand an answer to the writer; False when it is none (aborted, or the engine stopped)."""
        row, params = self._open.pop(completion.request_id)
        if completion.finish_reason is FinishReason.ABORT or completion.error_code == EngineStopped.code:
            return False
        self.writer.add(result_of(completion, row, params, keep_token_ids=self._settings.keep_token_ids))
        return True

    def _given_up(self) -> bool:
        return self._lease.lost or self._lease.cancelled or self._stop.is_set()

    def _check(self) -> None:
        if self._lease.lost:
            raise LeaseLost(f"chunk {self._chunk.id}: the lease ran out")
        if self._lease.cancelled:
            raise _Interrupted(ChunkStatus.CANCELLED)
        if self._stop.is_set():
            raise _Interrupted(ChunkStatus.RELEASED)

    def _released(self, status: ChunkStatus) -> ChunkOutcome:
        """Record what finished and give the chunk back."""
        try:
            self.writer.flush()
            patiently(lambda: self._store.release(self._chunk.id, self._chunk.epoch), lambda: self._lease.lost)
        except (LeaseLost, *STORE_OUT_OF_REACH) as error:
            return ChunkOutcome(ChunkStatus.LOST, error=str(error))
        return self._ended(status)

    def _failed(self, message: str) -> ChunkOutcome:
        """Record what finished; the caller lets the lease run out."""
        try:
            self.writer.flush()
        except (LeaseLost, *STORE_OUT_OF_REACH) as error:
            return ChunkOutcome(ChunkStatus.LOST, error=str(error))
        return self._ended(ChunkStatus.FAILED, message)

    def _job_failed(self, code: str, message: str) -> ChunkOutcome:
        """End the job, since no other attempt would go better, and keep what finished."""
        _fail_job(self._store, self._job, code, message)
        return replace(self._released(ChunkStatus.JOB_FAILED), error=message)

    def _ended(self, status: ChunkStatus, error: str | None = None) -> ChunkOutcome:
        return ChunkOutcome(status, self.writer.num_ok, self.writer.num_errors, error)


def _fail_job(store: Store, job: Job, code: str, message: str) -> None:
    logger.error("job %s cannot run: %s: %s", job.name, code, message)
    store.fail_job(job.id, code, message)
