"""Connections and transactions: one engine per store, SQLite and PostgreSQL behaving alike."""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import sqlalchemy as sa
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from storage.errors import InvalidStore, StorageError, StoreFailed, StoreFull, StoreUnavailable
from storage.private import make_file
from storage.redaction import redacted
from storage.retry import Backoff, complain
from storage.sql.encoding import dumps
from storage.sql.outages import DRIVER_ERRORS, Cause, cause_of, is_read_only, original
from storage.sql.sessions import LIMITS, connect_arguments
from storage.sql.tables import UtcTime

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

BUSY_SECONDS = 60.0
"""How long a SQLite connection waits for the one writer before it gives up, at most."""

OLDEST_SQLITE = (3, 38)
"""The first with the JSON operators that the views use."""

ENCODE = "a password with one of / : @ ? # needs it percent-encoded, as in p%40ss"
BAD_PORT = f"the port is not a number from 1 to 65535; {ENCODE}"
BAD_HOST = f"there is an @ in the host; {ENCODE}"


def parse_url(url: str) -> URL:
    """The SQLAlchemy URL of a store. Raises `InvalidStore` for anything but a SQLite file or PostgreSQL."""
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise InvalidStore(
            f"{redacted(url)!r} is not a store URL; use sqlite:///FILE or postgresql://USER@HOST/DATABASE"
        ) from error
    except ValueError:
        raise InvalidStore(f"{redacted(url)!r} is not a store URL: {BAD_PORT}") from None
    if parsed.port is not None and not 0 < parsed.port < 65536:
        raise InvalidStore(f"{redacted(url)!r} is not a store URL: {BAD_PORT}")
    if "@" in (parsed.host or ""):
        raise InvalidStore(f"{redacted(url)!r} is not a store URL: {BAD_HOST}")
    if parsed.drivername in ("postgres", "postgresql"):
        return parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername == "postgresql+psycopg":
        return parsed
    if parsed.drivername not in ("sqlite", "sqlite+pysqlite"):
        raise InvalidStore(f"a store is SQLite or PostgreSQL, not {parsed.drivername}: {shown(parsed)}")
    if not parsed.database or parsed.database == ":memory:" or "mode=memory" in parsed.database:
        raise InvalidStore("an in-memory SQLite store cannot be shared by threads; use sqlite:///FILE")
    return parsed


def shown(url: URL) -> str:
    """The URL for messages: without passwords."""
    return redacted(url.render_as_string(hide_password=True))


def without_secrets(text: str, url: URL) -> str:
    """A message about a store, without what is secret in its URL: drivers quote parts of that."""
    return redacted(text, url.render_as_string(hide_password=False))


class Database:
    """Runs functions inside transactions, and again when a transaction failed for a passing reason.

    A function given to `read` or `write` takes the connection first and may be called more than once: after a lost
    connection, a deadlock, a read-only phase or a busy database it is retried until `patience` seconds are over.
    Nothing of a failed transaction stays. When patience is over they raise `StoreUnavailable`; at once, they raise
    `StoreFull` where no space is left and `StoreFailed` for what no waiting mends. No error of a driver comes out.
    """

    def __init__(self, url: str, *, patience: float) -> None:
        self.url = parse_url(url)
        self.patience = patience
        self.read_only = _is_read_only(self.file)
        """Whether this is an SQLite file that can only be looked at here."""
        self.engine = _create_engine(self.url, patience, self.file if self.read_only else None)
        self._writing = self.engine.execution_options(nightdraft_write=True)
        self._in_use: tuple[int, int] | None = None
        """Device and inode of the SQLite file that the connections hold."""
        # SQLite lets waiting writers poll, and does not queue them; the threads of this process can queue.
        self._turn: AbstractContextManager[Any] = threading.Lock() if self.is_sqlite else nullcontext()

    @property
    def is_sqlite(self) -> bool:
        return self.url.get_backend_name() == "sqlite"

    @property
    def file(self) -> Path | None:
        """The file of an SQLite store. (A URI hides it.)"""
        name = str(self.url.database)
        return Path(name).absolute() if self.is_sqlite and not name.startswith("file:") else None

    @property
    def folder(self) -> Path | None:
        """Where an SQLite file lies."""
        return self.file.parent if self.file else None

    @property
    def has_no_file(self) -> bool:
        """Whether SQLite would have to create the file: even a look at the database would."""
        return self.file is not None and (not self.file.exists() or self.file.stat().st_size == 0)

    def read(self, work: Callable[Concatenate[sa.Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`work(connection, ...)` in one read transaction: a consistent view on SQLite, READ COMMITTED elsewhere."""
        return self._run(self.engine, self.patience, work, *args, **kwargs)

    def write(self, work: Callable[Concatenate[sa.Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`work(connection, ...)` in one write transaction, committed when it returns."""
        return self._run(self._writing, self.patience, work, *args, **kwargs)

    def read_once(self, work: Callable[Concatenate[sa.Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`read` without a second try, for opening: whoever mistypes an address should not have to wait."""
        return self._run(self.engine, 0.0, work, *args, **kwargs)

    def write_once(self, work: Callable[Concatenate[sa.Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`write` without a second try, for work that consumes an iterator."""
        return self._run(self._writing, 0.0, work, *args, **kwargs)

    def dispose(self) -> None:
        self.engine.dispose()

    def _run(
        self,
        engine: sa.Engine,
        patience: float,
        work: Callable[Concatenate[sa.Connection, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        give_up = time.monotonic() + patience
        backoff = Backoff(first=0.05, longest=2.0)
        turn = self._turn if engine is self._writing else nullcontext()
        if engine is self._writing:
            self._require_writable()
        self._require_same_file()
        while True:
            wait = backoff.next()
            try:
                with turn, engine.begin() as connection:
                    return work(connection, *args, **kwargs)
            except DRIVER_ERRORS as error:
                cause = cause_of(error, self.folder)
                if cause in (Cause.FULL, Cause.FINAL) or time.monotonic() + wait > give_up:
                    raise self._named(error, cause, opening=not patience) from error
                complain(log, f"the store {shown(self.url)} does not answer, trying again: {self._text_of(error)}")
            time.sleep(wait)

    def _require_writable(self) -> None:
        """Raises `StoreFailed` where nothing can be written. Makes the file of a store that is new."""
        if self.read_only:
            raise StoreFailed(
                f"the store {shown(self.url)} cannot be written: the file or its directory is read-only here; status,"
                " errors, sql and export only look at it"
            )
        if self.file is not None and self._in_use is None and not self.file.exists():
            try:
                make_file(self.file)
            except OSError as error:
                raise InvalidStore(f"cannot make the store {shown(self.url)}: {error.strerror}") from error

    def _require_same_file(self) -> None:
        """Raises `StoreFailed` when the SQLite file was deleted or replaced since it was first used: connections go on
        writing to the one that nobody can open any more."""
        if self.file is None:
            return
        try:
            found = self.file.stat()
            now = found.st_dev, found.st_ino
        except FileNotFoundError:
            now = None
        if self._in_use is None:
            self._in_use = now
        elif now != self._in_use:
            happened = "deleted" if now is None else "replaced"
            raise StoreFailed(
                f"the file of the store {shown(self.url)} was {happened} while it was in use, and what it held is not"
                " there any more: put a backup in its place, or begin anew"
            )

    def _text_of(self, error: BaseException) -> str:
        return without_secrets(str(original(error)).strip(), self.url)

    def _named(self, error: BaseException, cause: Cause, *, opening: bool) -> StorageError:
        """What comes out instead of a driver's error. A host or password that is not accepted is whoever opens the
        store's mistake; to one that had it open, it is an outage: of name service, or of whoever changes passwords."""
        name, text = shown(self.url), self._text_of(error)
        if cause is Cause.FULL:
            place = "on the database server" if self.folder is None else f"on the disk that holds {self.folder}"
            return StoreFull(f"no space is left for the store {name} ({text}): free some {place}; no record is lost")
        if cause is Cause.FINAL:
            return StoreFailed(f"the store {name} refuses: {text}")
        if opening and cause is not Cause.PASSING:
            return InvalidStore(f"cannot open the store {name}: {text}")
        return StoreUnavailable(f"the store {name} does not answer: {text}")


def clock(connection: sa.Connection) -> Any:
    """The current time as SQL, by the clock that all users of the store share: the server's, on PostgreSQL."""
    if connection.dialect.name == "sqlite":
        return sa.literal(datetime.now(UTC), UtcTime())
    return sa.func.now()


def later(connection: sa.Connection, seconds: float) -> Any:
    """`clock` plus some seconds (or minus, when negative), as SQL."""
    if connection.dialect.name == "sqlite":
        return sa.literal(datetime.fromtimestamp(time.time() + seconds, UTC), UtcTime())
    return sa.func.now() + sa.func.make_interval(0, 0, 0, 0, 0, 0, seconds)


def _is_read_only(file: Path | None) -> bool:
    return file is not None and file.exists() and not (os.access(file, os.W_OK) and os.access(file.parent, os.W_OK))


def read_only_uri(file: Path) -> str:
    """The URI with which SQLite only looks at a file, where it may not write beside it as well.

    Raises `InvalidStore` when changes lie beside the file that cannot be read so.
    """
    uri = f"{file.as_uri()}?mode=ro"
    if os.access(file.parent, os.W_OK):
        return uri
    changes, index = (file.with_name(file.name + ending) for ending in ("-wal", "-shm"))
    if not changes.exists() or changes.stat().st_size == 0:
        # Nobody can change the file, so SQLite need not keep an index of changes beside it.
        return f"{uri}&immutable=1"
    if index.exists():
        return uri
    raise InvalidStore(
        f"the store {file} has changes in {changes.name} that cannot be read where nothing can be written: copy both to"
        " another directory, and use the copy"
    )


def _create_engine(url: URL, patience: float, read_only: Path | None) -> sa.Engine:
    if url.drivername.startswith("postgresql"):
        engine = sa.create_engine(
            url,
            connect_args=connect_arguments(url, LIMITS),
            pool_pre_ping=True,
            pool_size=8,
            max_overflow=24,
            json_serializer=dumps,
        )
        sa.event.listen(engine, "handle_error", _leave_when_read_only)
        return engine
    if sqlite3.sqlite_version_info < OLDEST_SQLITE:
        raise StoreUnavailable(
            f"this Python comes with SQLite {sqlite3.sqlite_version}, which is older than"
            f" {'.'.join(map(str, OLDEST_SQLITE))}: use another Python build, or PostgreSQL"
        )
    parent = Path(str(url.database)).parent
    if not parent.is_dir():
        raise InvalidStore(f"the directory {parent} of the store {shown(url)} does not exist; create it")
    busy = max(1.0, min(patience, BUSY_SECONDS))
    if read_only is None:
        engine = sa.create_engine(
            url, connect_args={"timeout": busy}, pool_size=8, max_overflow=24, json_serializer=dumps
        )
        sa.event.listen(engine, "connect", _prepare_sqlite)
    else:
        uri = read_only_uri(read_only)

        def look() -> sqlite3.Connection:
            return sqlite3.connect(uri, uri=True, timeout=busy, check_same_thread=False)

        engine = sa.create_engine(url, creator=look, pool_size=8, max_overflow=24, json_serializer=dumps)
        sa.event.listen(engine, "connect", _leave_transactions_to_us)
    sa.event.listen(engine, "begin", _begin_sqlite)
    return engine


def _leave_when_read_only(context: sa.engine.ExceptionContext) -> None:
    """Close a session that turns out to be read-only, and the others of its time, as if the connection were lost: they
    stay so, and the next ones may reach a server that is not."""
    if is_read_only(context.original_exception):
        context.is_disconnect = True


def _leave_transactions_to_us(connection: sqlite3.Connection, record: Any) -> None:
    # The driver must not begin transactions itself: it begins them deferred, and a deferred transaction that turns
    # into a writer fails at once, without waiting, when another one wrote in between.
    connection.isolation_level = None


def _prepare_sqlite(connection: sqlite3.Connection, record: Any) -> None:
    _leave_transactions_to_us(connection, record)
    for pragma in ("foreign_keys = ON", "synchronous = NORMAL", "temp_store = MEMORY"):
        connection.execute(f"PRAGMA {pragma}")
    _use_wal(connection)


def _use_wal(connection: sqlite3.Connection) -> None:
    """Switch to write-ahead logging; the switch itself does not wait for other connections, so wait here."""
    give_up = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > give_up:
                raise
            time.sleep(0.02)


def _begin_sqlite(connection: sa.Connection) -> None:
    writing = connection.get_execution_options().get("nightdraft_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writing else "BEGIN")
