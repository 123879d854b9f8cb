"""A room of the store: the statements on one subject, each method one transaction on the store's database.

`reads` and `writes` make such a method of a statement. The statement takes the connection of its transaction; callers
of the method leave it out. A statement may run more than once (see `Database`), so it changes nothing but the database.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import sqlalchemy as sa

from storage.sql.database import Database


class Room:
    def __init__(self, database: Database) -> None:
        self.database = database


P = ParamSpec("P")
R = TypeVar("R", bound=Room)
T = TypeVar("T")


def reads(statement: Callable[Concatenate[R, sa.Connection, P], T]) -> Callable[Concatenate[R, P], T]:
    """One read transaction."""
    return _method(Database.read, statement)


def writes(statement: Callable[Concatenate[R, sa.Connection, P], T]) -> Callable[Concatenate[R, P], T]:
    """One write transaction, committed when the statement returns."""
    return _method(Database.write, statement)


def writes_once(statement: Callable[Concatenate[R, sa.Connection, P], T]) -> Callable[Concatenate[R, P], T]:
    """`writes` without a second try, for a statement that consumes an iterator."""
    return _method(Database.write_once, statement)


def _method(
    run: Callable[..., Any], statement: Callable[Concatenate[R, sa.Connection, P], T]
) -> Callable[Concatenate[R, P], T]:
    @wraps(statement)
    def call(room: R, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = run(room.database, lambda connection: statement(room, connection, *args, **kwargs))
        return result

    return call
