"""Opening the store that a command names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
    """`open_store` for a command that only looks, or needs a job to be there: nothing is set up at a mistyped place.
    Raises `storage.errors.NoStore` where nothing is."""
    with Store.open(store_url(value), create=False) as store:
        yield store
