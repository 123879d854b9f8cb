"""The records that flow between the packages: frozen, free of torch, Celery and SQLAlchemy."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from datetime import datetime
from enum import StrEnum
from typing import Any

from storage.spec import JobSpec


class JobState(StrEnum):
    QUEUED = "queued"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        return self in (JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED)


class ChunkState(StrEnum):
    PENDING = "pending"
    """Waits for dispatch."""
    DISPATCHED = "dispatched"
    """A message with its epoch is (or was) on the broker."""
    RUNNING = "running"
    """Claimed: a worker holds the lease."""
    DONE = "done"
    """Every (row, sample) of it has a recorded result or error."""
    CANCELLED = "cancelled"


class RowStatus(StrEnum):
    OK = "ok"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class InputFile:
    """One Parquet file as it was at submission; resuming against anything else is refused."""

    index: int
    path: str
    size: int
    modified: str
    """mtime in nanoseconds, or the etag of an object store."""
    schema: str
    """Arrow schema, one "name: type" per line."""
    row_groups: tuple[int, ...]
    """Rows in each row group."""
    first_row: int
    """Index in the dataset of this file's first row."""
    partitions: dict[str, int | str | None] = field(default_factory=dict)
    """Columns that folders named key=value give to all its rows; the same keys, and types, in all files of a job."""

    @property
    def num_rows(self) -> int:
        return sum(self.row_groups)


@dataclass(frozen=True, slots=True)
class Job:
    id: str
    name: str
    state: JobState
    spec: JobSpec
    """As submitted, its columns and its skip set settled."""
    spec_hash: str
    num_rows: int
    num_samples: int
    """Samples per row (n)."""
    created_at: datetime
    started_at: datetime | None = None
    finished_at: datetime | None = None
    error_code: str | None = None
    error_message: str | None = None
    notes: tuple[str, ...] = ()
    """What was told of the input when it was submitted: files left out, columns that are not obeyed or renamed."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A contiguous row range of one input file. `start_row` counts in the dataset, `file_row` in the file."""

    id: int
    job_id: str
    index: int
    file_index: int
    start_row: int
    file_row: int
    num_rows: int
    state: ChunkState = ChunkState.PENDING
    epoch: int = 0
    """Raised by every claim and every release; a write with an older epoch is refused (fencing)."""
    attempts: int = 0
    """Claims that ended without a release: the worker died or lost its lease."""
    worker_id: str | None = None
    lease_until: datetime | None = None

    @property
    def message(self) -> ChunkMessage:
        """The hint with which a worker may claim it as it is now."""
        return ChunkMessage(self.job_id, self.id, self.epoch)

    @property
    def lease(self) -> Lease:
        """What its claim gave the worker, on a chunk as a claim returned it."""
        return Lease(self.id, self.epoch)


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to work on a chunk, by one claim: it holds while the chunk runs under this epoch."""

    chunk_id: int
    epoch: int


@dataclass(frozen=True, slots=True)
class RowInHand:
    """The row that a worker runs alone, with what its record needs should the worker not live to write it."""

    row_index: int
    row_id: str | None = None
    carried: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ChunkMessage:
    """What travels over the broker: a hint; SQL is the truth."""

    job_id: str
    chunk_id: int
    epoch: int


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens and steps, of one answer or summed over many. Where all was recorded, output = steps + accepted."""

    num_output_tokens: int = 0
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Acceptance(TokenCounts):
    """Acceptance statistics of one result: integers; every rate is derived in SQL."""

    num_trimmed_draft_tokens: int = 0
    acceptance_histogram: tuple[int, ...] = ()
    reached_per_position: tuple[int, ...] = ()
    accepted_per_position: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """The one record of a (row, sample): an answer or an error."""

    row_index: int
    sample: int
    status: RowStatus
    output_text: str | None = None
    output_token_ids: tuple[int, ...] | None = None
    """Kept on request only."""
    finish_reason: str | None = None
    stop_reason: str | None = None
    """With finish_reason "stop": the stop string, or the digits of the stop id."""
    error_code: str | None = None
    error_message: str | None = None
    row_id: str | None = None
    """Value of the id column."""
    carried: dict[str, Any] = field(default_factory=dict)
    """The row's other columns, as JSON values."""
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    method: str | None = None
    """Speculator (and lossy verification rule, if any) that ran."""
    temperature: float | None = None
    seed: int | None = None
    logprobs: list[Any] | None = None
    queue_seconds: float | None = None
    first_token_seconds: float | None = None
    total_seconds: float | None = None
    draft_seconds: float | None = None
    """Its share in the drafting of the steps that it took part in."""
    verify_seconds: float | None = None
    """Its share in the rest of these steps."""
    num_preemptions: int | None = None
    acceptance: Acceptance | None = None


@dataclass(frozen=True, slots=True)
class Counts(TokenCounts):
    """What is counted over recorded results. Every chunk keeps these counters, in columns of the same names."""

    num_ok: int = 0
    num_errors: int = 0
    engine_microseconds: int = 0
    """Shares that the recorded answers had in the steps of engines: no loading, no compiling, no waiting."""


TOKEN_COUNTS = tuple(field.name for field in fields(TokenCounts))
COUNTS = tuple(field.name for field in fields(Counts))


@dataclass(frozen=True, slots=True)
class JobProgress:
    """How far a job is, for `status`, `watch` and the live display."""

    num_results: int
    """Expected (row, sample) pairs."""
    chunks: dict[ChunkState, int]
    counts: Counts = Counts()
