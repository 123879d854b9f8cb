"""`nightdraft submit`: record a job; schedulers and workers do the rest."""

from __future__ import annotations

from typing import Annotated

import typer

from runner.cli.flags import Given, takes
from runner.cli.options import DEFAULT_STORE, Json, New, Store
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
