"""Opening the store that a command names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from storage.database import sqlite_file
from storage.errors import InvalidStore
from storage.store import Store


def store_url(value: str) -> str:
    """A database URL as it is; a plain file name means an SQLite file."""
    return value if "://" in value else f"sqlite:///{Path(value).expanduser()}"


@contextmanager
def open_store(value: str) -> Iterator[Store]:
    """The store, closed at the end of the block. Raises `storage.errors.StorageError` when it cannot be used."""
    with Store.open(store_url(value)) as store:
        yield store


@contextmanager
def existing_store(value: str) -> Iterator[Store]:
    """`open_store` for a command that needs a job to be there already: a mistyped file is not set up as a new store."""
    file = sqlite_file(store_url(value))
    if file is not None and not file.exists():
        raise InvalidStore(
            f"there is no store {file}: --store or NIGHTDRAFT_STORE names it; `run` and `submit` make one"
        )
    with open_store(value) as store:
        yield store
