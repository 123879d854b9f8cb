"""Commands about drafts on the user's own prompts, ahead of a job: no store, nothing recorded."""

from __future__ import annotations

from typing import Annotated

import typer

from runner.cli.flags import Given, takes
from runner.cli.options import Json
from runner.output.output import Output

DEFAULT_LIMIT, DEFAULT_TOKENS = 32, 64


@takes(
    "--target", "--method", "--draft", "--dtype", "--limit", "--max-tokens",
    limit=DEFAULT_LIMIT, max_tokens=DEFAULT_TOKENS,
)  # fmt: skip
def calibrate(
    given: Given,
    batch: Annotated[
        int | None,
        typer.Option("--batch", min=1, help="Batch size to optimise for (default: max_batch; 1 for method self)."),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option("--out", "-o", metavar="FILE", help="self: a file for --skip-file; default: where jobs look."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Fit a speculator to a target and to your prompts. medusa: the tree, kept beside the heads; self: what to skip."""
    from runner.drafts.calibrate import calibrate as run

    run(given.spec(), Output(as_json), batch=batch, out=out)


@takes(
    "--target", "--method", "--draft", "--draft-dtype", "--dtype", "--limit", "--max-tokens",
    limit=DEFAULT_LIMIT, max_tokens=DEFAULT_TOKENS,
)  # fmt: skip
def check_draft(
    given: Given,
    batch: Annotated[
        list[int] | None,
        typer.Option("--batch", min=1, help="Batch size to time; repeatable; default: 1, 4, 16."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure what makes a good draft, on your prompts: speed, acceptance, size, vocabulary, memory, speedup."""
    from runner.drafts.check import check_draft as run

    raise typer.Exit(run(given.spec(), Output(as_json), batches=batch))
