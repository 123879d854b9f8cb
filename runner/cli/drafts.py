"""Commands about drafts on the user's own prompts, ahead of a job: no store, nothing recorded."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from runner.cli.options import Json

DEFAULT_LIMIT, DEFAULT_TOKENS = 32, 64

Inputs = Annotated[
    list[str],
    typer.Argument(metavar="INPUT...", help="Parquet files, directories, globs or URLs; or one job file (YAML, JSON)."),
]
Target = Annotated[
    str | None, typer.Option("--target", metavar="MODEL", help="Directory, hub id, GGUF file or alias (smollm2-135m).")
]
Limit = Annotated[int, typer.Option("--limit", min=1, metavar="N", help="Only the first N rows.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", min=1, help="Output tokens for each row, at most.")]
Dtype = Annotated[str | None, typer.Option("--dtype", help="Precision of the target, as in `nightdraft run`.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any key of the job spec: docs/configuration.md.")
]


def calibrate(
    inputs: Inputs,
    method: Annotated[str, typer.Option("--method", help="medusa or self.")],
    target: Target = None,
    draft: Annotated[str | None, typer.Option("--draft", metavar="DIR", help="medusa: directory of the heads.")] = None,
    batch: Annotated[
        int | None,
        typer.Option("--batch", min=1, help="Sequences at a time that it is for; default: max_batch, self: 1."),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option("--out", "-o", metavar="FILE", help="self: a file for --skip-file; default: where jobs look."),
    ] = None,
    limit: Limit = DEFAULT_LIMIT,
    max_tokens: MaxTokens = DEFAULT_TOKENS,
    dtype: Dtype = None,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Fit a speculator to a target and to your prompts. medusa: the tree, kept beside the heads; self: what to skip."""
    from runner.drafts.calibrate import calibrate as run
    from runner.spec.overrides import build_spec

    flags = _flags(target, dtype, limit, max_tokens, {"method": method, "draft": draft})
    run(build_spec(inputs, flags, settings or []), batch=batch, out=out, as_json=as_json)


def check_draft(
    inputs: Inputs,
    target: Target = None,
    method: Annotated[str | None, typer.Option("--method", help="Method; --draft implies draft_model.")] = None,
    draft: Annotated[
        str | None, typer.Option("--draft", metavar="MODEL", help="The draft, as in `nightdraft run`.")
    ] = None,
    draft_dtype: Annotated[str | None, typer.Option("--draft-dtype", help="As in `nightdraft run`.")] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option("--batch", min=1, help="Batch size to time; repeatable; default: 1, 4, 16."),
    ] = None,
    limit: Limit = DEFAULT_LIMIT,
    max_tokens: MaxTokens = DEFAULT_TOKENS,
    dtype: Dtype = None,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Measure what makes a good draft, on your prompts: speed, acceptance, size, vocabulary, memory, speedup."""
    from runner.drafts.check import check_draft as run
    from runner.spec.overrides import build_spec

    speculation = {"method": method, "draft": draft, "draft_dtype": draft_dtype}
    flags = _flags(target, dtype, limit, max_tokens, speculation)
    raise typer.Exit(run(build_spec(inputs, flags, settings or []), batches=batch, as_json=as_json))


def _flags(
    target: str | None, dtype: str | None, limit: int, max_tokens: int, speculation: dict[str, Any]
) -> dict[str, Any]:
    return {
        "input": {"limit": limit},
        "engine": {"target": target, "dtype": dtype, "speculation": speculation},
        "sampling": {"max_tokens": max_tokens},
    }
