"""The store: every statement that the other packages may make, on SQLite or PostgreSQL, safe to call from threads.

The statements are methods of its rooms, one subject each: `store.jobs.get("last")`, `store.chunks.claim(...)`.
Synchronous: async code calls them through `anyio.to_thread.run_sync`. A method is one short transaction, where it does
not say otherwise. After a lost connection, a deadlock, a read-only phase or a busy database it tries again until
`patience` seconds are over, and then raises `StoreUnavailable`; `StoreFull` and `StoreFailed` come at once. No error of
a driver comes out.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from storage.errors import NoStore
from storage.sql import revisions
from storage.sql.database import Database, shown
from storage.store.chunks import Chunks
from storage.store.jobs import Jobs
from storage.store.reaping import Reaper
from storage.store.results import Results
from storage.store.telemetry import Telemetry

SERVICE_PATIENCE = 5.0
"""Seconds of patience for a process that has to hear signals between two calls; longer outages it sees to itself, with
`storage.retry`."""


class Store:
    """Jobs, chunks, results and statistics in one database. Open it with `Store.open`; a context manager."""

    def __init__(self, url: str, *, patience: float = 60.0) -> None:
        """Connect lazily, without a look at the schema. Raises `InvalidStore` for an unusable URL."""
        self.database = Database(url, patience=patience)
        self.url = shown(self.database.url)
        """For messages: without passwords."""
        self.jobs = Jobs(self.database)
        self.chunks = Chunks(self.database)
        self.results = Results(self.database)
        self.telemetry = Telemetry(self.database)
        self.reaper = Reaper(self.database)

    @classmethod
    def open(cls, url: str, *, patience: float = 60.0, create: bool = True) -> Self:
        """Connect, setting up a new SQLite file or an empty PostgreSQL database (or schema) if `create`.

        Raises `NoStore` where nothing is there and nothing may be set up, `InvalidStore` for a URL or a file that is no
        store, `StoreUnavailable` when the database does not answer and `SchemaOutdated` when it needs an upgrade.
        """
        store = cls(url, patience=patience)
        try:
            if store.database.has_no_file or store.database.read_once(revisions.is_empty):
                if not create:
                    raise NoStore(
                        f"there is no store {store.url} yet: `nightdraft run` and `nightdraft submit` make it,"
                        " --store or NIGHTDRAFT_STORE names another"
                    )
                store.database.write_once(revisions.upgrade_if_empty)
            store.database.read_once(revisions.require_head, store.url)
        except BaseException:
            store.dispose()
            raise
        return store

    def upgrade(self) -> None:
        """Bring the schema to the revision of this version."""
        self.database.write_once(revisions.upgrade)

    @property
    def read_only(self) -> bool:
        """Whether the store can only be looked at here: an SQLite file on a medium that cannot be written."""
        return self.database.read_only

    def dispose(self) -> None:
        """Close every connection."""
        self.database.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.dispose()
