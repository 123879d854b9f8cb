"""`nightdraft sql`: read-only SQL on the store."""

from __future__ import annotations

from typing import Annotated

import typer

from runner.cli.options import DEFAULT_STORE, Json, Store


def sql(
    query: Annotated[str, typer.Argument(metavar="QUERY", help="One read-only statement; views: docs/statistics.md.")],
    output_format: Annotated[
        str | None,
        typer.Option(
            "--format", metavar="FORMAT", help="table, json, csv or parquet; default: what --out is named for."
        ),
    ] = None,
    out: Annotated[
        str | None, typer.Option("--out", "-o", metavar="FILE", help="Write to a file, not to stdout.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="Rows of a table; the other formats write all.")] = 200,
    store: Store = DEFAULT_STORE,
    as_json: Json = False,
) -> None:
    """Query jobs, results and acceptance statistics."""
    from runner.output.query import write_query
    from runner.stores import existing_store

    with existing_store(store) as opened:
        write_query(opened, query, "json" if as_json else output_format, out, limit)
