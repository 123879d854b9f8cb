"""Why a database did not do as it was told: the one list of what passes and what does not.

Nothing of the drivers leaves the store: what they raise is sorted here, and comes out as an error of `storage.errors`.
"""

from __future__ import annotations

import shutil
import sqlite3
from enum import Enum, auto
from pathlib import Path

import psycopg
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError

DRIVER_ERRORS = (DBAPIError, sa.exc.TimeoutError, psycopg.Error, sqlite3.Error)
"""All that SQLAlchemy and the drivers below it raise. (TimeoutError: no connection of the pool became free.)"""

NEARLY_FULL_BYTES = 1 << 20
"""Free space at which an I/O error of SQLite is put down to a full disk: not all of them say so."""


class Cause(Enum):
    PASSING = auto()
    """Down, restarting, failing over, locked or overloaded: the same again may go well in a while."""
    FULL = auto()
    """No space is left where the database lives: it goes on once somebody has made room."""
    ADDRESS = auto()
    """Whoever opens the store gave a host, database, user, password or option that is not accepted there."""
    FILE = auto()
    """The file is no database, or cannot be opened or created."""
    FINAL = auto()
    """No waiting mends it."""


_PASSING_CLASSES = ("08", "40", "53")
"""Connection lost or refused; rolled back (serialisation failure, deadlock); out of connections, memory or space."""

_PASSING_STATES = frozenset({
    "25006",  # read-only: a failover, or a server that went over to it
    "25P03",  # idle_in_transaction_session_timeout
    "25P04",  # transaction_timeout
    "55P03",  # lock_timeout
    "57014",  # statement_timeout, or cancelled by an administrator
    "57P01",  # shut down by an administrator
    "57P02",  # crash of another session
    "57P03",  # starting up, shutting down or recovering
    "57P05",  # idle_session_timeout
    "58000",  # system error
    "58030",  # I/O error
})  # fmt: skip

READ_ONLY = "25006"
_FULL = "53100"
_ADDRESS_CLASSES = ("28", "3D")
"""Authentication; no such database."""

# While connecting the driver knows no SQLSTATE, only what the server, or libpq, wrote.
_ADDRESS_WORDS = (
    "authentication failed",
    "does not exist",
    "failed to resolve host",
    "could not translate host name",
    "no password supplied",
    "no pg_hba.conf entry",
    "not permitted to log in",
    "permission denied for database",
    "does not support SSL",
    "server requires SSL",
    "certificate",
    "unrecognized configuration parameter",
    "invalid value for parameter",
    "permission denied to set parameter",
    "unsupported startup parameter",
    "invalid port number",
)
_PASSING_WORDS = ("Temporary failure in name resolution",)

_SQLITE_PASSING = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL, sqlite3.SQLITE_IOERR)
_SQLITE_FILE = (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CANTOPEN)


def original(error: BaseException) -> BaseException:
    """What the driver raised, without SQLAlchemy's wrapping (which repeats the statement)."""
    return error.orig if isinstance(error, DBAPIError) and error.orig is not None else error


def cause_of(error: BaseException, folder: Path | None = None) -> Cause:
    """The reason for one of `DRIVER_ERRORS`. `folder`: where an SQLite file lies."""
    if isinstance(error, sa.exc.TimeoutError):
        return Cause.PASSING
    found = original(error)
    if isinstance(found, sqlite3.Error):
        return _cause_in_sqlite(found, folder)
    if isinstance(found, psycopg.Error) and found.sqlstate is not None:
        return _cause_of_state(found.sqlstate)
    if isinstance(error, DBAPIError) and error.connection_invalidated:
        return Cause.PASSING
    if isinstance(found, psycopg.OperationalError | psycopg.InterfaceError):
        return _cause_of_text(str(found))
    # Parameters of the URL that libpq does not know.
    return Cause.ADDRESS if isinstance(found, psycopg.ProgrammingError) else Cause.FINAL


def is_read_only(error: BaseException) -> bool:
    """Whether PostgreSQL refused to write in this session."""
    found = original(error)
    return isinstance(found, psycopg.Error) and found.sqlstate == READ_ONLY


def _cause_of_state(state: str) -> Cause:
    if state == _FULL:
        return Cause.FULL
    if state in _PASSING_STATES or state[:2] in _PASSING_CLASSES:
        return Cause.PASSING
    return Cause.ADDRESS if state[:2] in _ADDRESS_CLASSES else Cause.FINAL


def _cause_of_text(text: str) -> Cause:
    if any(words in text for words in _PASSING_WORDS):
        return Cause.PASSING
    return Cause.ADDRESS if any(words in text for words in _ADDRESS_WORDS) else Cause.PASSING


def _cause_in_sqlite(error: sqlite3.Error, folder: Path | None) -> Cause:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_FULL:
        return Cause.FULL
    if code in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN) and folder is not None and _is_nearly_full(folder):
        return Cause.FULL
    if code in _SQLITE_PASSING:
        return Cause.PASSING
    return Cause.FILE if code in _SQLITE_FILE else Cause.FINAL


def _is_nearly_full(folder: Path) -> bool:
    try:
        return shutil.disk_usage(folder).free < NEARLY_FULL_BYTES
    except OSError:
        return False
