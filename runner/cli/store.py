"""Commands about the store as a whole: SQL on it, and its schema."""

from __future__ import annotations

from typing import Annotated

import typer

from runner.cli.options import DEFAULT_STORE, Json, Store
from runner.output.output import Output


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
    from runner.stores import open_store

    with open_store(store, create=False) as opened:
        write_query(opened, query, "json" if as_json else output_format, out, limit)


schema = typer.Typer(no_args_is_help=True, help="The store's schema.")


@schema.callback()
def _group() -> None:
    pass


@schema.command("upgrade")
def upgrade(store: Store = DEFAULT_STORE, as_json: Json = False) -> None:
    """Bring the store's schema to the one that this version needs. Back up the database first."""
    from runner.stores import store_url
    from storage.store.store import Store as JobStore

    with JobStore(store_url(store)) as opened:
        opened.upgrade()
        Output(as_json).show({"store": str(opened.url)}, f"{opened.url} is up to date")
