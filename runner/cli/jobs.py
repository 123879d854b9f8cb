"""Commands about jobs in the store: recording, following and steering them, their results. None loads a model."""

from __future__ import annotations

from typing import Annotated

import typer

from runner.cli.flags import Given, takes
from runner.cli.options import DEFAULT_STORE, JobName, Json, New, Store
from runner.errors import UsageError
from runner.output.output import Output


@takes("--name", job_file=True)
def submit(
    given: Given,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the job until it ends.")] = False,
    new: New = False,
    store: Store = DEFAULT_STORE,
    as_json: Json = False,
) -> None:
    """Check a job and its input, and record it for `nightdraft scheduler` to dispatch."""
    from runner.jobs.submit import submit_job
    from runner.jobs.watch import watch_job
    from runner.output.jobs import show_submission
    from runner.spec.overrides import require_job_file
    from runner.stores import open_store

    require_job_file(given.inputs[0])
    spec = given.spec()
    with open_store(store) as opened:
        submission = submit_job(opened, spec, new=new)
        if wait:
            raise typer.Exit(watch_job(opened, submission.job.id, Output(as_json)))
        show_submission(Output(as_json), submission)


def status(
    job: Annotated[
        str | None, typer.Argument(metavar="[JOB]", help="Name or id of a job, or 'last'; without it: all jobs.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Jobs in the list, the newest first.")] = 20,
    store: Store = DEFAULT_STORE,
    as_json: Json = False,
) -> None:
    """Show the state and the counts of one job, or the list of jobs."""
    from runner.output.jobs import show_job, show_jobs
    from runner.output.summary import summary_of
    from runner.stores import open_store

    with open_store(store, create=False) as opened:
        if job is not None:
            found = opened.jobs.get(job)
            show_job(Output(as_json), summary_of(opened, found), opened.results.error_groups(found.id))
            return
        show_jobs(Output(as_json), [summary_of(opened, each) for each in opened.jobs.newest(limit)])


def watch(job: JobName, store: Store = DEFAULT_STORE, as_json: Json = False) -> None:
    """Follow a job until it ends; Ctrl-C stops watching, not the job. Ends with the job's exit code."""
    from runner.jobs.watch import watch_job
    from runner.stores import open_store

    with open_store(store, create=False) as opened:
        raise typer.Exit(watch_job(opened, opened.jobs.get(job).id, Output(as_json)))


def cancel(job: JobName, store: Store = DEFAULT_STORE, as_json: Json = False) -> None:
    """Stop a job. Finished rows stay recorded; `resume` goes on from there."""
    from runner.stores import open_store
    from scheduler import lifecycle

    with open_store(store, create=False) as opened:
        found = opened.jobs.get(job)
        state = lifecycle.cancel(opened, found.id)
        Output(as_json).show({"job": found.id, "name": found.name, "state": state}, f"{found.name} is {state}")


def resume(job: JobName, store: Store = DEFAULT_STORE, as_json: Json = False) -> None:
    """Put the unfinished chunks of a cancelled or failed job back in line."""
    from runner.output.jobs import show_reopened
    from runner.stores import open_store
    from scheduler import lifecycle

    with open_store(store, create=False) as opened:
        found = opened.jobs.get(job)
        chunks = lifecycle.resume(opened, found.id)
        show_reopened(Output(as_json), found, chunks, "", "no unfinished chunks")


def retry(
    job: JobName,
    failed: Annotated[bool, typer.Option("--failed", help="Generate the rows again whose result is an error.")] = False,
    store: Store = DEFAULT_STORE,
    as_json: Json = False,
) -> None:
    """Generate failed rows again. A success replaces the error; a success is never replaced."""
    from runner.output.jobs import show_reopened
    from runner.stores import open_store
    from scheduler import lifecycle

    if not failed:
        raise UsageError("say what is tried again: nightdraft retry JOB --failed")
    with open_store(store, create=False) as opened:
        found = opened.jobs.get(job)
        chunks = lifecycle.retry(opened, found.id)
        show_reopened(Output(as_json), found, chunks, " with failed rows", "no failed rows")


def errors(
    job: JobName,
    group: Annotated[bool, typer.Option("--group", help="Count the errors by code instead of listing rows.")] = False,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Rows in the list.")] = 50,
    store: Store = DEFAULT_STORE,
    as_json: Json = False,
) -> None:
    """Show the rows of a job that ended with an error."""
    from runner.output.jobs import show_error_groups, show_errors
    from runner.stores import open_store

    with open_store(store, create=False) as opened:
        found = opened.jobs.get(job)
        if group:
            show_error_groups(Output(as_json), opened.results.error_groups(found.id))
        else:
            show_errors(Output(as_json), opened.results.errors(found.id, limit), limit)


def export(
    job: JobName,
    out: Annotated[str, typer.Option("--out", "-o", metavar="FILE", help="Parquet file that is written.")],
    partial: Annotated[
        bool,
        typer.Option("--partial", help="Export what there is: of a job that has not ended, or whose input is gone."),
    ] = False,
    token_ids: Annotated[
        bool, typer.Option("--token-ids", help="Add output_token_ids (the job must have kept them).")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is not an export of this job.")] = False,
    store: Store = DEFAULT_STORE,
    as_json: Json = False,
) -> None:
    """Write every row of a job, in input order, with its input columns, its answer and its statistics."""
    from runner.jobs.export import export_to
    from runner.output.jobs import show_export
    from runner.stores import open_store

    with open_store(store, create=False) as opened:
        found = opened.jobs.get(job)
        report = export_to(opened, found, out, partial=partial, token_ids=token_ids, force=force)
        show_export(Output(as_json), report)
