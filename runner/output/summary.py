"""A job in numbers: what `status`, `watch`, the final table and their JSON all show."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from runner.errors import ExitCode
from runner.output.draft_advice import draft_warning
from scheduler.daemon.recovery import as_seen
from storage.records import TOKEN_COUNTS, Counts, Job, JobProgress, JobState
from storage.redaction import redacted
from workers.engine.api.errors import InvalidConfig, ModelNotFound, UnsupportedModel
from workers.errors import InvalidSpec, LoadFailed

if TYPE_CHECKING:
    from storage.store.store import Store

CONFIG_ERRORS = tuple(error.code for error in (ModelNotFound, UnsupportedModel, InvalidConfig, InvalidSpec, LoadFailed))
"""Error codes of a job that says something that no worker can do."""

_SHOWN_COUNTS = ("num_ok", "num_errors", *TOKEN_COUNTS)


@dataclass(frozen=True, slots=True)
class JobSummary:
    """Counts of one job. Rates are None where there was nothing to divide by."""

    id: str
    name: str
    state: JobState
    num_rows: int
    num_results: int
    """Expected (row, sample) pairs."""
    counts: Counts
    mean_acceptance_length: float | None
    draft_acceptance_rate: float | None
    chunks: dict[str, int]
    created_at: datetime
    started_at: datetime | None
    finished_at: datetime | None
    seconds: float | None
    """From the first claim to the end, or to now."""
    output_tokens_per_second: float | None
    """Over `seconds`, as in the view `throughput`."""
    decode_tokens_per_second: float | None
    """Of one engine, over the steps of the recorded answers: no loading, no compiling, no waiting."""
    error_code: str | None
    error_message: str | None
    notes: tuple[str, ...]
    """What was told of the input when the job was submitted."""
    draft_warning: str | None = None
    """What to say when next to none of the drafted tokens were accepted."""
    interrupted: bool = False
    """It has begun and has not ended, and nobody works on it."""

    @property
    def shown_state(self) -> str:
        return "interrupted" if self.interrupted else self.state.value

    @property
    def num_done(self) -> int:
        return self.counts.num_ok + self.counts.num_errors

    def to_dict(self) -> dict[str, Any]:
        shown: dict[str, Any] = {}
        for name, value in asdict(self).items():
            shown |= {each: value[each] for each in _SHOWN_COUNTS} if name == "counts" else {name: value}
        return shown


def summary_of(store: Store, job: Job) -> JobSummary:
    """The job and its counts, once what dead workers held is taken back, and whether anybody works on it."""
    job = as_seen(store, job)
    idle = job.state is JobState.IN_PROGRESS and store.telemetry.activity(job.id).nobody
    return summarise(job, store.jobs.progress(job.id), interrupted=idle)


def summarise(job: Job, progress: JobProgress, now: datetime | None = None, *, interrupted: bool = False) -> JobSummary:
    """Put a job and its counts together."""
    counts = progress.counts
    steps, accepted, drafted = counts.num_spec_steps, counts.num_accepted_draft_tokens, counts.num_draft_tokens
    engine = counts.engine_microseconds / 1e6
    end = job.finished_at or (now or datetime.now(UTC))
    seconds = (end - job.started_at).total_seconds() if job.started_at else None
    return JobSummary(
        id=job.id,
        name=job.name,
        state=job.state,
        num_rows=job.num_rows,
        num_results=progress.num_results,
        counts=counts,
        mean_acceptance_length=(accepted + steps) / steps if steps else None,
        draft_acceptance_rate=accepted / drafted if drafted else None,
        chunks={str(state): count for state, count in progress.chunks.items() if count},
        created_at=job.created_at,
        started_at=job.started_at,
        finished_at=job.finished_at,
        seconds=seconds,
        output_tokens_per_second=counts.num_output_tokens / seconds if seconds else None,
        decode_tokens_per_second=counts.num_output_tokens / engine if engine else None,
        error_code=job.error_code,
        error_message=job.error_message and redacted(job.error_message),
        notes=job.notes,
        draft_warning=draft_warning(job, counts),
        interrupted=interrupted,
    )


def exit_code_of(job: Job, num_errors: int) -> ExitCode:
    """Exit code for a job that is over, or was interrupted."""
    if not job.state.terminal:
        return ExitCode.INTERRUPTED
    if job.state is not JobState.COMPLETED:
        return ExitCode.USAGE if job.error_code in CONFIG_ERRORS else ExitCode.FAILED
    return ExitCode.FAILED_ROWS if num_errors else ExitCode.OK
