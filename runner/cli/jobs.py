"""Commands about jobs in the store. None of them loads a model."""

from __future__ import annotations

from typing import Annotated

import typer

from runner.cli.options import DEFAULT_STORE, JobName, Json, Store
from runner.errors import UsageError
from runner.output.output import Output


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
    from runner.stores import existing_store

    with existing_store(store) as opened:
        if job is not None:
            found = opened.jobs.get(job)
            show_job(Output(as_json), summary_of(opened, found), opened.results.error_groups(found.id))
            return
        show_jobs(Output(as_json), [summary_of(opened, each) for each in opened.jobs.newest(limit)])


def watch(job: JobName, store: Store = DEFAULT_STORE, as_json: Json = False) -> None:
    """Follow a job until it ends; Ctrl-C stops watching, not the job. Ends with the job's exit code."""
    from runner.jobs.watch import watch_job
    from runner.stores import existing_store

    with existing_store(store) as opened:
        raise typer.Exit(watch_job(opened, opened.jobs.get(job).id, Output(as_json)))


def cancel(job: JobName, store: Store = DEFAULT_STORE, as_json: Json = False) -> None:
    """Stop a job. Finished rows stay recorded; `resume` goes on from there."""
    from runner.stores import existing_store
    from scheduler import lifecycle

    with existing_store(store) as opened:
        found = opened.jobs.get(job)
        state = lifecycle.cancel(opened, found.id)
        Output(as_json).show({"job": found.id, "name": found.name, "state": state}, f"{found.name} is {state}")


def resume(job: JobName, store: Store = DEFAULT_STORE, as_json: Json = False) -> None:
    """Put the unfinished chunks of a cancelled or failed job back in line."""
    from runner.output.jobs import show_reopened
    from runner.stores import existing_store
    from scheduler import lifecycle

    with existing_store(store) as opened:
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
    from runner.stores import existing_store
    from scheduler import lifecycle

    if not failed:
        raise UsageError("say what is tried again: nightdraft retry JOB --failed")
    with existing_store(store) as opened:
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
    from runner.stores import existing_store

    with existing_store(store) as opened:
        found = opened.jobs.get(job)
        if group:
            show_error_groups(Output(as_json), opened.results.error_groups(found.id))
        else:
            show_errors(Output(as_json), opened.results.errors(found.id, limit), limit)
