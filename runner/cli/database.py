"""`nightdraft db`: the store's schema."""

from __future__ import annotations

import typer

from runner.cli.options import DEFAULT_STORE, Json, Store
from runner.output.output import Output

app = typer.Typer(no_args_is_help=True, help="The store's schema.")


@app.callback()
def _group() -> None:
    pass


@app.command("upgrade")
def upgrade(store: Store = DEFAULT_STORE, as_json: Json = False) -> None:
    """Bring the store's schema to the one that this version needs. Back up the database first."""
    from runner.stores import store_url
    from storage.store.store import Store as JobStore

    with JobStore(store_url(store)) as opened:
        opened.upgrade()
        Output(as_json).show({"store": str(opened.url)}, f"{opened.url} is up to date")
