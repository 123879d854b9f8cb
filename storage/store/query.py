"""SQL of the user's own, over the tables and views: read-only whatever the statement says."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import psycopg

from storage.errors import InvalidQuery
from storage.redaction import redacted
from storage.sql.database import BUSY_SECONDS, read_only_uri
from storage.sql.sessions import QUERY_LIMITS, connect_arguments
from storage.store.store import Store

Rows = tuple[list[str], Iterator[tuple[Any, ...]]]


def run_sql(store: Store, sql: str) -> Rows:
    """Column names, and the rows as they come from the database, in bounded memory.

    One statement, on a connection of its own that cannot write. Raises `InvalidQuery` with the database's message, for
    several statements, for one that writes and for one that gives no rows.
    """
    rows = _sqlite_rows(store, sql) if store.database.is_sqlite else _postgres_rows(store, sql)
    columns = cast(list[str], next(rows))
    return columns, cast(Iterator[tuple[Any, ...]], rows)


def _sqlite_rows(store: Store, sql: str) -> Iterator[Any]:
    """The column names, then the rows."""
    file = store.database.file or Path(str(store.database.url.database)).absolute()
    uri = read_only_uri(file)
    try:
        with closing(sqlite3.connect(uri, uri=True, timeout=BUSY_SECONDS, check_same_thread=False)) as connection:
            connection.execute("PRAGMA query_only = ON")
            cursor = connection.execute(sql)
            yield _names(cursor.description)
            yield from cursor
    except (sqlite3.Error, sqlite3.Warning) as error:
        raise InvalidQuery(_message(error)) from error


def _postgres_rows(store: Store, sql: str) -> Iterator[Any]:
    arguments: dict[str, Any] = dict(connect_arguments(store.database.url, QUERY_LIMITS))
    url = store.database.url.set(drivername="postgresql").render_as_string(hide_password=False)
    try:
        with (
            psycopg.connect(url, **arguments) as connection,
            connection.cursor() as cursor,
        ):
            connection.execute("SET TRANSACTION READ ONLY")
            # stream() sends one statement only: no second one can end the read-only transaction.
            rows: Iterator[Any] = cursor.stream(cast(Any, sql))
            first = next(rows, None)
            if first is None:
                # Without a row stream() tells no columns.
                rows = iter(cursor.execute(cast(Any, sql), prepare=True))
            yield _names(cursor.description)
            if first is not None:
                yield first
            yield from rows
    except psycopg.Error as error:
        raise InvalidQuery(redacted(_message(error), url)) from error


def _names(description: Any) -> list[str]:
    if not description:
        raise InvalidQuery("the statement gives no rows; only queries can be run here")
    return [column[0] for column in description]


def _message(error: Exception) -> str:
    text = str(error).strip()
    if "readonly database" in text or "read-only transaction" in text:
        return f"only queries can be run here, nothing that changes the store ({text})"
    if "statement timeout" in text:
        limit = QUERY_LIMITS["statement_timeout"]
        return f"{text}: a query has {limit}; options=-cstatement_timeout%3D3h in the store URL gives it more"
    return text
