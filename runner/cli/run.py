"""`nightdraft run`: the whole job in this process."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from runner.cli.options import DEFAULT_STORE, Json, Store, described
from workers.engine.api.config import (
    DRAFT_DTYPES,
    DTYPES,
    METHODS,
    POLICIES,
    VERIFY_RULES,
    VOCABULARIES,
    EngineConfig,
    SpeculationConfig,
)
from workers.engine.api.sampling_params import SamplingParams

SPECULATION = "Speculation"
SAMPLING = "Sampling"
ENGINE = "Engine"
INPUT = "Input"


def run(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="INPUT...", help="Parquet files, directories, globs or URLs; or one job file (YAML, JSON)."
        ),
    ],
    target: Annotated[
        str | None,
        typer.Option("--target", metavar="MODEL", help="Directory, hub id, GGUF file or alias (smollm2-135m)."),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            "--method", help=described(", ".join(METHODS), SpeculationConfig, "method"), rich_help_panel=SPECULATION
        ),
    ] = None,
    row_methods: Annotated[
        list[str] | None,
        typer.Option(
            "--row-method",
            metavar="METHOD",
            help="Further method that the rows' column 'speculation' may name; repeatable.",
            rich_help_panel=SPECULATION,
        ),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            "--draft",
            metavar="MODEL",
            help="Draft model (implies draft_model; 'target' is the target itself); Medusa heads; EAGLE layer.",
            rich_help_panel=SPECULATION,
        ),
    ] = None,
    draft_dtype: Annotated[
        str | None,
        typer.Option(
            "--draft-dtype",
            help=described(
                f"Of the draft: {', '.join(DRAFT_DTYPES)}; default: the target's", SpeculationConfig, "draft_dtype"
            ),
            rich_help_panel=SPECULATION,
        ),
    ] = None,
    vocabulary: Annotated[
        str | None,
        typer.Option(
            "--vocabulary",
            help=described(
                f"draft_model with another tokenizer: {', '.join(VOCABULARIES)}", SpeculationConfig, "vocabulary"
            ),
            rich_help_panel=SPECULATION,
        ),
    ] = None,
    skip_file: Annotated[
        str | None,
        typer.Option(
            "--skip-file",
            metavar="FILE",
            help=described("self: a set of sublayers from `nightdraft calibrate`", SpeculationConfig, "skip_file"),
            rich_help_panel=SPECULATION,
        ),
    ] = None,
    max_draft_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-draft-tokens",
            help=described("Depth of the draft (default: 4, or the heads)", SpeculationConfig, "max_draft_tokens"),
            rich_help_panel=SPECULATION,
        ),
    ] = None,
    tree_width: Annotated[
        int | None,
        typer.Option(
            "--tree-width",
            help=described("Candidates per level; 1 is a chain", SpeculationConfig, "tree_width"),
            rich_help_panel=SPECULATION,
        ),
    ] = None,
    tree_nodes: Annotated[
        int | None,
        typer.Option(
            "--tree-nodes",
            help=described("Dynamic tree: so many of the best nodes", SpeculationConfig, "tree_nodes"),
            rich_help_panel=SPECULATION,
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy", help=described(", ".join(POLICIES), SpeculationConfig, "policy"), rich_help_panel=SPECULATION
        ),
    ] = None,
    verify: Annotated[
        str | None,
        typer.Option(
            "--verify",
            help=described(", ".join(VERIFY_RULES), SpeculationConfig, "verify"),
            rich_help_panel=SPECULATION,
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            help=described("Output tokens at most", SamplingParams, "max_tokens"),
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature", help=described("0: greedy", SamplingParams, "temperature"), rich_help_panel=SAMPLING
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option("--top-p", help=described("Nucleus sampling", SamplingParams, "top_p"), rich_help_panel=SAMPLING),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Seed of the job; every row derives its own.", rich_help_panel=SAMPLING)
    ] = None,
    max_batch: Annotated[
        int | None,
        typer.Option(
            "--max-batch",
            help=described("Sequences that run together", EngineConfig, "max_batch"),
            rich_help_panel=ENGINE,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help=described(", ".join(DTYPES), EngineConfig, "dtype"), rich_help_panel=ENGINE),
    ] = None,
    prompt_column: Annotated[
        str | None,
        typer.Option("--prompt-column", metavar="COLUMN", help="Column of prompt strings.", rich_help_panel=INPUT),
    ] = None,
    messages_column: Annotated[
        str | None,
        typer.Option(
            "--messages-column", metavar="COLUMN", help="Column of {role, content} lists.", rich_help_panel=INPUT
        ),
    ] = None,
    id_column: Annotated[
        str | None,
        typer.Option("--id-column", metavar="COLUMN", help="Column kept as the row id.", rich_help_panel=INPUT),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", help="Only the first N rows.", metavar="N", rich_help_panel=INPUT)
    ] = None,
    chunk_rows: Annotated[
        int | None, typer.Option("--chunk-rows", help="Rows per chunk.", metavar="N", rich_help_panel=INPUT)
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any key of the job spec, e.g. sampling.top_k=40."),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the job; default: derived from input and spec.")
    ] = None,
    new: Annotated[bool, typer.Option("--new", help="Start a fresh job where one of that name exists.")] = False,
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
    from runner.jobs.run import run_command
    from runner.spec.overrides import build_spec

    flags: dict[str, Any] = {
        "name": name,
        "seed": seed,
        "chunk_rows": chunk_rows,
        "input": {
            "prompt_column": prompt_column,
            "messages_column": messages_column,
            "id_column": id_column,
            "limit": limit,
        },
        "engine": {
            "target": target,
            "max_batch": max_batch,
            "dtype": dtype,
            "speculation": {
                "method": method,
                "row_methods": row_methods or None,
                "draft": draft,
                "draft_dtype": draft_dtype,
                "vocabulary": vocabulary,
                "skip_file": skip_file,
                "max_draft_tokens": max_draft_tokens,
                "tree_width": tree_width,
                "tree_nodes": tree_nodes,
                "policy": policy,
                "verify": verify,
            },
        },
        "sampling": {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p},
    }
    spec = build_spec(inputs, flags, settings or [])
    if dry_run:
        from runner.jobs.dry_run import show_dry_run

        raise typer.Exit(show_dry_run(spec, as_json=as_json))
    raise typer.Exit(run_command(spec, store, new=new, out=out, force=force, as_json=as_json, verbose=verbose))
