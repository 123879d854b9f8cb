"""`nightdraft run`: the whole job in this process."""

from __future__ import annotations

from typing import Annotated

import typer

from runner.cli.flags import FLAGS, Given, takes
from runner.cli.options import DEFAULT_STORE, Json, New, Store
from runner.output.output import Output


@takes(*FLAGS)
def run(
    given: Given,
    new: New = False,
    out: Annotated[
        str | None,
        typer.Option("--out", "-o", metavar="DIR", help="Export to DIR/NAME.parquet (or to this .parquet file)."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Let --out replace a file that is not an export of this job.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show three prompts, the token histogram and the plan; generate nothing.")
    ] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Log every chunk, and failures with their tracebacks.")
    ] = False,
    store: Store = DEFAULT_STORE,
    as_json: Json = False,
) -> None:
    """Run a batch of prompts in this process, without a broker. The same command again resumes."""
    spec, output = given.spec(), Output(as_json)
    if dry_run:
        from runner.jobs.dry_run import show_dry_run

        raise typer.Exit(show_dry_run(spec, output))
    from runner.jobs.run import run_command

    raise typer.Exit(run_command(spec, store, output, new=new, out=out, force=force, verbose=verbose))
