"""How jobs, errors, exports and checks are shown: as JSON, and to people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from runner.output.console import counted, format_bytes, note
from runner.output.output import Fields, Output, Table
from runner.output.rates import format_duration
from runner.output.summary import JobSummary
from storage.redaction import redacted

if TYPE_CHECKING:
    from runner.output.checks import Check
    from scheduler.intake.submission import Submission
    from storage.files.export import ExportReport
    from storage.records import Job, Result

NEXT_STEPS = "the scheduler hands them out; a job of `nightdraft run` goes on when the same command is given again"


def nobody_works(job_name: str) -> str:
    """What to do with a job that was interrupted."""
    return (
        "nobody works on it: give the same `nightdraft run` command again, or start `nightdraft worker` and `nightdraft"
        f" scheduler`; `nightdraft export {job_name} --partial` writes what is recorded"
    )


def show_jobs(output: Output, jobs: Sequence[JobSummary]) -> None:
    """The list of jobs, the newest first."""
    columns = ("job", "name", "state", "done", "of", "failed", "tokens", "mean acceptance", "created")
    rows = [
        (
            job.id[:8],
            job.name,
            job.shown_state,
            job.num_done,
            job.num_results,
            job.counts.num_errors,
            job.counts.num_output_tokens,
            job.mean_acceptance_length,
            job.created_at,
        )
        for job in jobs
    ]
    output.show([job.to_dict() for job in jobs], Table(columns, rows, empty="no jobs in this store"))


def show_job(output: Output, job: JobSummary, errors: Sequence[Any]) -> None:
    """One job in full, its errors by code below it."""
    _show(output, job.to_dict(), Fields(_job_fields(job), job.name), errors)


def show_run(output: Output, job: JobSummary, errors: Sequence[Any], tokens_per_second: float | None) -> None:
    """What became of `run`: the job in full, and how fast this run was (None: it generated nothing)."""
    fields = _job_fields(job)
    if tokens_per_second is not None:
        fields["tokens/s of this run"] = f"{tokens_per_second:.1f} since the model was loaded"
    values = {**job.to_dict(), "tokens_per_second": tokens_per_second}
    _show(output, values, Fields(fields, job.name), errors)


def _show(output: Output, values: dict[str, Any], fields: Fields, errors: Sequence[Any]) -> None:
    groups = [_as_mapping(group) for group in errors]
    output.show({**values, "errors": groups}, fields, *([_error_table(groups)] if groups else []))


def _job_fields(job: JobSummary) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "job": job.id,
        "state": job.shown_state,
        "rows ok": f"{job.counts.num_ok} of {job.num_results}",
        "rows failed": job.counts.num_errors,
        "output tokens": job.counts.num_output_tokens,
    }
    fields["mean acceptance length"] = job.mean_acceptance_length
    fields["draft acceptance rate"] = job.draft_acceptance_rate
    fields["time"] = format_duration(job.seconds)
    if job.output_tokens_per_second is not None:
        fields["tokens/s over that time"] = f"{job.output_tokens_per_second:.1f}"
    if job.decode_tokens_per_second is not None:
        fields["tokens/s of an engine"] = f"{job.decode_tokens_per_second:.1f} while it decoded, loading left out"
    if not job.state.terminal:
        fields["chunks"] = ", ".join(f"{count} {state}" for state, count in job.chunks.items())
    if job.interrupted:
        fields["next"] = nobody_works(job.name)
    if job.error_message:
        fields["error"] = f"{job.error_code}: {job.error_message}"
    if job.draft_warning:
        fields["warning"] = job.draft_warning
    if job.notes:
        fields["of the input"] = "; ".join(job.notes)
    return fields


def show_error_groups(output: Output, groups: Sequence[Any]) -> None:
    """Failed rows counted by code."""
    rows = [_as_mapping(group) for group in groups]
    output.show(rows, _error_table(rows))


def _error_table(groups: Sequence[dict[str, Any]]) -> Table:
    columns = list(groups[0]) if groups else []
    return Table(columns, [list(group.values()) for group in groups], title="errors", empty="no errors")


def show_errors(output: Output, results: Sequence[Result], limit: int) -> None:
    """Failed rows, one by one."""
    columns = ("row_index", "sample", "row_id", "error_code", "error_message")
    rows = [[getattr(result, column) for column in columns] for result in results]
    for row in rows:
        row[-1] = row[-1] and redacted(row[-1])
    table = Table(columns, rows, empty="no errors")
    output.show(table.records(), table)
    if len(rows) == limit:
        note(f"the first {limit} are shown; --limit N shows more")


def show_submission(output: Output, submission: Submission) -> None:
    """What `submit` did, and what comes next."""
    job = submission.job
    done = "is there already, with the same spec and input" if submission.resumed else "is recorded"
    text = f"job {job.name} ({job.id}) {done}: {job.num_rows} rows, {job.state}; next: nightdraft watch {job.name}"
    values = {
        "job": job.id,
        "name": job.name,
        "state": job.state,
        "num_rows": job.num_rows,
        "resumed": submission.resumed,
    }
    output.show(values, text)


def show_export(output: Output, report: ExportReport) -> None:
    """What was written, and where."""
    parts = [f"{report.num_ok} ok", f"{report.num_errors} failed"]
    if report.num_missing:
        parts.append(f"{report.num_missing} not recorded yet")
    text = f"{report.path}: {counted(report.num_rows, 'row')} ({', '.join(parts)}), {format_bytes(report.num_bytes)}"
    if report.renamed:
        text += "; renamed: " + ", ".join(f"{column} to {name}" for column, name in report.renamed.items())
    if report.num_unreadable:
        text += f"; damaged or lost, with null in what cannot be read: {counted(report.num_unreadable, 'input row')}"
    for lost in report.lost_files:
        note(f"warning: {lost}")
    output.show(_as_mapping(report), text)


def show_reopened(output: Output, job: Job, chunks: int, what: str, nothing: str) -> None:
    """What `resume` and `retry` put back in line; `nothing` says that there was nothing to."""
    verb = "is" if chunks == 1 else "are"
    text = f"{counted(chunks, 'chunk')}{what} {verb} back in line; {NEXT_STEPS}" if chunks else nothing
    output.show({"job": job.id, "name": job.name, "chunks": chunks}, f"{job.name}: {text}")


def show_checks(output: Output, checks: Sequence[Check]) -> int:
    """The findings of `doctor`; returns the exit code."""
    rows = [(check.level.value, check.name, redacted(check.found), check.advice) for check in checks]
    records = Table(("level", "check", "found", "advice"), rows).records()
    output.show(records, Table(("", "check", "found", "what to do"), rows))
    return int(any(check.level.value == "broken" for check in checks))


def _as_mapping(record: Any) -> dict[str, Any]:
    from dataclasses import asdict, is_dataclass

    return asdict(record) if is_dataclass(record) and not isinstance(record, type) else dict(record)
