"""`nightdraft export`: a job's results as Parquet, in input order."""

from __future__ import annotations

from typing import Annotated

import typer

from runner.cli.options import DEFAULT_STORE, JobName, Json, Store
from runner.output.output import Output


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
    from runner.stores import existing_store

    with existing_store(store) as opened:
        found = opened.jobs.get(job)
        report = export_to(opened, found, out, partial=partial, token_ids=token_ids, force=force)
        show_export(Output(as_json), report)
