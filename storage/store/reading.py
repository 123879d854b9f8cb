"""Reading results back: in input order, page by page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from storage.records import Acceptance, Result, RowStatus
from storage.sql.tables import SAME_RESULT, acceptance, results

_STATISTICS = tuple(column for column in acceptance.c if column.name not in ("job_id", "row_index", "sample"))
_EMITTED = acceptance.c.num_output_tokens.label("num_emitted_tokens")


@dataclass(frozen=True, slots=True)
class ErrorGroup:
    """All the errors of one code in a job."""

    error_code: str
    num_errors: int
    first_row_index: int
    example_message: str | None


def page(connection: sa.Connection, job_id: str, after: tuple[int, int], limit: int) -> list[Result]:
    """The next results after a (row_index, sample), in that order."""
    query = (
        _with_acceptance()
        .where(results.c.job_id == job_id, sa.tuple_(results.c.row_index, results.c.sample) > sa.tuple_(*after))
        .order_by(results.c.row_index, results.c.sample)
        .limit(limit)
    )
    return [result_from_row(row) for row in connection.execute(query)]


def errors(connection: sa.Connection, job_id: str, limit: int) -> list[Result]:
    """The first errors of a job, in input order."""
    query = (
        _with_acceptance()
        .where(results.c.job_id == job_id, results.c.status == sa.literal_column("'error'"))
        .order_by(results.c.row_index, results.c.sample)
        .limit(limit)
    )
    return [result_from_row(row) for row in connection.execute(query)]


def error_groups(connection: sa.Connection, job_id: str) -> list[ErrorGroup]:
    """Errors by code, the most frequent first."""
    query = sa.text(
        "SELECT error_code, num_errors, first_row_index, example_message FROM job_errors"
        " WHERE job_id = :job_id ORDER BY num_errors DESC, error_code"
    )
    return [ErrorGroup(*row) for row in connection.execute(query, {"job_id": job_id})]


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
        num_spec_steps=row.num_spec_steps,
        num_draft_tokens=row.num_draft_tokens,
        num_accepted_draft_tokens=row.num_accepted_draft_tokens,
        num_trimmed_draft_tokens=row.num_trimmed_draft_tokens,
        num_output_tokens=row.num_emitted_tokens,
        acceptance_histogram=tuple(row.acceptance_histogram),
        reached_per_position=tuple(row.reached_per_position),
        accepted_per_position=tuple(row.accepted_per_position),
    )


def _with_acceptance() -> sa.Select[Any]:
    statistics = (column for column in _STATISTICS if column.name != "num_output_tokens")
    return sa.select(*results.c, *statistics, _EMITTED).select_from(results).outerjoin(acceptance, SAME_RESULT)
