"""`nightdraft submit`: record a job; schedulers and workers do the rest."""

from __future__ import annotations

from typing import Annotated

import typer

from runner.cli.options import DEFAULT_STORE, Json, Store


def submit(
    job_file: Annotated[str, typer.Argument(metavar="JOB.yaml", help="Job file, YAML or JSON: docs/configuration.md.")],
    wait: Annotated[bool, typer.Option("--wait", help="Follow the job until it ends.")] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any key of the job file, e.g. engine.max_batch=32."),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="Name of the job; lies over the file's.")] = None,
    new: Annotated[bool, typer.Option("--new", help="Start a fresh job where one of that name exists.")] = False,
    store: Store = DEFAULT_STORE,
    as_json: Json = False,
) -> None:
    """Check a job and its input, and record it for `nightdraft scheduler` to dispatch."""
    from runner.jobs.submit import submit_job
    from runner.jobs.watch import watch_job
    from runner.output.jobs import show_submission
    from runner.spec.overrides import build_spec, require_job_file
    from runner.stores import open_store

    require_job_file(job_file)
    spec = build_spec([job_file], {"name": name}, settings or [])
    with open_store(store) as opened:
        submission = submit_job(opened, spec, new=new)
        if wait:
            raise typer.Exit(watch_job(opened, submission.job.id, as_json=as_json))
        show_submission(submission, as_json=as_json)
