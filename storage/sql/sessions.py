"""PostgreSQL sessions that end by themselves: no process that hangs, and no machine that is lost, may hold up others.

Each limit is a parameter of libpq or a setting of PostgreSQL, under its own name, and whoever opens the store overrides
it: `postgresql://HOST/NAME?tcp_user_timeout=5000&options=-clock_timeout%3D2s`, or PGOPTIONS in the environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta

import sqlalchemy as sa
from sqlalchemy.engine import URL

CONNECTION = {
    "connect_timeout": "10",
    "keepalives_idle": "15",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "20000",
    "fallback_application_name": "nightdraft",
}
"""Parameters of libpq: how long this side waits for a server that is silent. tcp_user_timeout is in milliseconds."""

_SERVER_SIDE = {
    "tcp_keepalives_idle": "15",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "20s",
}
"""How long the server waits for this machine before it takes the session, and its locks, for gone."""

LIMITS = {
    **_SERVER_SIDE,
    "idle_in_transaction_session_timeout": "10s",
    "lock_timeout": "5s",
    "statement_timeout": "5min",
}
"""Of the store's own transactions, which are short: the longest count the rows of a whole job."""

QUERY_LIMITS = {
    **_SERVER_SIDE,
    "idle_in_transaction_session_timeout": "1h",
    "lock_timeout": "10s",
    "statement_timeout": "1h",
}
"""Of SQL that users write. It only reads; its rows may go to a pager, or take a while to compute."""

MIGRATION_LIMITS = {
    "idle_in_transaction_session_timeout": "10min",
    "lock_timeout": "1min",
    "statement_timeout": "0",
}
"""Of changes to the schema, which may rewrite large tables, and wait until nobody uses them."""


def connect_arguments(url: URL, limits: Mapping[str, str]) -> dict[str, str]:
    """Parameters for the driver, beside the URL's own and instead of its `options`. What a user set counts more."""
    own = " ".join(f"-c {name}={value}" for name, value in limits.items())
    given = url.query.get("options", os.environ.get("PGOPTIONS", ""))
    theirs = given if isinstance(given, str) else " ".join(given)
    arguments = {name: value for name, value in CONNECTION.items() if name not in url.query}
    if "PGCONNECT_TIMEOUT" in os.environ:
        arguments.pop("connect_timeout", None)
    return {**arguments, "options": f"{own} {theirs}".strip()}


def allow_migration(connection: sa.Connection) -> None:
    """Set the limits of this transaction to those of a migration."""
    for name, value in MIGRATION_LIMITS.items():
        connection.exec_driver_sql(f"SET LOCAL {name} = '{value}'")


def end_frozen(connection: sa.Connection) -> list[int]:
    """End sessions of this store's users whose process fell silent in the middle of a statement; their process ids.

    PostgreSQL ends a session that is silent between two statements by itself. One that is silent inside a COPY, or half
    way through a message, counts as active, and none of its timeouts looks at it, nor do keepalives when the process
    was only stopped. So whoever finds a chunk locked past its lease looks for such sessions.
    """
    limit = connection.exec_driver_sql(
        "SELECT setting::int FROM pg_settings WHERE name = 'idle_in_transaction_session_timeout'"
    ).scalar_one()
    if not limit:
        return []
    frozen = sa.text(
        "SELECT pid FROM pg_stat_activity"
        " WHERE datname = current_database() AND usename = current_user AND pid <> pg_backend_pid()"
        " AND application_name = current_setting('application_name')"
        " AND state = 'active' AND wait_event = 'ClientRead' AND state_change < clock_timestamp() - :limit"
    )
    pids = list(connection.execute(frozen, {"limit": timedelta(milliseconds=limit)}).scalars())
    for pid in pids:
        connection.execute(sa.select(sa.func.pg_terminate_backend(pid)))
    return pids
