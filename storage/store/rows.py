"""Rows of the tables as records, and records as rows."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from storage.errors import RefusedSpec
from storage.records import TOKEN_COUNTS, Acceptance, Chunk, InputFile, Job, Result, RowStatus
from storage.spec import JobSpec
from storage.sql.encoding import dumps, integers, is_storable, storable, to_bytes
from storage.sql.tables import chunks, jobs

CHUNK_COLUMNS = tuple(
    chunks.c[name]
    for name in (
        "id", "job_id", "index", "file_index", "start_row", "file_row", "num_rows", "state", "epoch", "attempts",
        "worker_id", "lease_until",
    )
)  # fmt: skip
_PLAIN = ("num_prompt_tokens", "num_output_tokens", "method", "temperature")
_TIMES = (
    "queue_seconds", "first_token_seconds", "total_seconds", "draft_seconds", "verify_seconds", "num_preemptions",
)  # fmt: skip
RESULT_COLUMNS = (
    "job_id", "row_index", "sample", "epoch", "recorded_at", "status", "output_text", "output_bytes",
    "output_token_ids", "finish_reason", "stop_reason", "error_code", "error_message", "row_id", "carried",
    *_PLAIN, "seed", "logprobs", *_TIMES,
)  # fmt: skip
_ACCEPTANCE_COUNTS = (*TOKEN_COUNTS, "num_trimmed_draft_tokens")
SPECULATION_COUNTS = tuple(name for name in TOKEN_COUNTS if name != "num_output_tokens")
"""The token counts of a result that are columns of `acceptance`; its output tokens are one of `results`."""
_ACCEPTANCE_ARRAYS = ("acceptance_histogram", "reached_per_position", "accepted_per_position")
ACCEPTANCE_COLUMNS = ("job_id", "row_index", "sample", *_ACCEPTANCE_COUNTS, *_ACCEPTANCE_ARRAYS)


_plain = attrgetter(*_PLAIN)
_times = attrgetter(*_TIMES)
_counts = attrgetter(*_ACCEPTANCE_COUNTS)


def spec_from_row(row: Any) -> JobSpec:
    """The spec in a row of `jobs` (its columns `name` and `spec`). Raises `RefusedSpec`, naming the job."""
    try:
        return JobSpec.parse(row.spec)
    except RefusedSpec as error:
        raise RefusedSpec(f"the spec stored with job {row.name!r} cannot be read: {error}") from error


def job_from_row(row: Any) -> Job:
    """Raises `RefusedSpec` for a spec of another shape than this version's."""
    return Job(
        id=row.id,
        name=row.name,
        state=row.state,
        spec=spec_from_row(row),
        spec_hash=row.spec_hash,
        num_rows=row.num_rows,
        num_samples=row.num_samples,
        created_at=row.created_at,
        started_at=row.started_at,
        finished_at=row.finished_at,
        error_code=row.error_code,
        error_message=row.error_message,
        notes=tuple(row.notes),
    )


def job_values(job: Job) -> dict[str, Any]:
    names = (column.name for column in jobs.columns)
    return {**{name: getattr(job, name) for name in names}, "spec": job.spec.to_json(), "notes": list(job.notes)}


def file_from_row(row: Any) -> InputFile:
    return InputFile(
        index=row._mapping["index"],
        path=row.path,
        size=row.size,
        modified=row.modified,
        schema=row.schema,
        row_groups=tuple(row.row_groups),
        first_row=row.first_row,
        partitions=row.partitions,
    )


def file_values(job_id: str, file: InputFile) -> dict[str, Any]:
    return {
        "job_id": job_id,
        "index": file.index,
        "path": file.path,
        "size": file.size,
        "modified": file.modified,
        "schema": file.schema,
        "row_groups": list(file.row_groups),
        "first_row": file.first_row,
        "partitions": file.partitions,
    }


def chunk_from_row(row: Any) -> Chunk:
    return Chunk(*(row._mapping[column.name] for column in CHUNK_COLUMNS))


def chunk_values(job_id: str, chunk: Chunk) -> dict[str, Any]:
    values = {
        "job_id": job_id,
        "index": chunk.index,
        "file_index": chunk.file_index,
        "start_row": chunk.start_row,
        "file_row": chunk.file_row,
        "num_rows": chunk.num_rows,
        "state": chunk.state,
        "epoch": chunk.epoch,
        "attempts": chunk.attempts,
    }
    if chunk.id:
        values["id"] = chunk.id
    return values


def output_text(row: Any) -> str | None:
    """The output exactly as recorded: from its bytes, where the text column could not hold it."""
    return row.output_text if row.output_bytes is None else bytes(row.output_bytes).decode()


def result_from_row(row: Any) -> Result:
    """A `Result` from a row of results, with the acceptance columns beside them."""
    ids = row.output_token_ids
    return Result(
        row_index=row.row_index,
        sample=row.sample,
        status=RowStatus(row.status),
        output_text=output_text(row),
        output_token_ids=None if ids is None else tuple(ids),
        finish_reason=row.finish_reason,
        stop_reason=row.stop_reason,
        error_code=row.error_code,
        error_message=row.error_message,
        row_id=row.row_id,
        carried=row.carried,
        num_prompt_tokens=row.num_prompt_tokens,
        num_output_tokens=row.num_output_tokens,
        method=row.method,
        temperature=row.temperature,
        seed=None if row.seed is None else int(row.seed),
        logprobs=row.logprobs,
        queue_seconds=row.queue_seconds,
        first_token_seconds=row.first_token_seconds,
        total_seconds=row.total_seconds,
        draft_seconds=row.draft_seconds,
        verify_seconds=row.verify_seconds,
        num_preemptions=row.num_preemptions,
        acceptance=None if row.num_spec_steps is None else _acceptance(row),
    )


def _acceptance(row: Any) -> Acceptance:
    return Acceptance(
        num_output_tokens=row.num_emitted_tokens,
        num_trimmed_draft_tokens=row.num_trimmed_draft_tokens,
        **{name: getattr(row, name) for name in SPECULATION_COUNTS},
        acceptance_histogram=tuple(row.acceptance_histogram),
        reached_per_position=tuple(row.reached_per_position),
        accepted_per_position=tuple(row.accepted_per_position),
    )


def result_values(job_id: str, epoch: int, now: Any, result: Result) -> tuple[Any, ...]:
    text = result.output_text
    kept = None
    if text is not None and not is_storable(text):
        kept, text = to_bytes(text), storable(text)
    return (
        job_id,
        result.row_index,
        result.sample,
        epoch,
        now,
        result.status.value,
        text,
        kept,
        None if result.output_token_ids is None else dumps(result.output_token_ids),
        result.finish_reason,
        None if result.stop_reason is None else storable(result.stop_reason),
        result.error_code,
        None if result.error_message is None else storable(result.error_message),
        None if result.row_id is None else storable(result.row_id),
        dumps(result.carried) if result.carried else "{}",
        *_plain(result),
        None if result.seed is None else str(result.seed),
        None if result.logprobs is None else dumps(result.logprobs),
        *_times(result),
    )


def acceptance_values(job_id: str, row_index: int, sample: int, stats: Acceptance) -> tuple[Any, ...]:
    return (
        job_id,
        row_index,
        sample,
        *_counts(stats),
        integers(stats.acceptance_histogram),
        integers(stats.reached_per_position),
        integers(stats.accepted_per_position),
    )
