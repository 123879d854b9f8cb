"""Bringing a database to the schema that this version needs."""

from __future__ import annotations

import logging
from pathlib import Path

import sqlalchemy as sa

from storage.errors import SchemaOutdated
from storage.sql import views
from storage.sql.sessions import allow_migration

log = logging.getLogger(__name__)

HEAD = "0003"
"""The revision that this version needs: the newest one in storage/migrations/versions."""

_SCRIPTS = str(Path(__file__).parents[1] / "migrations")

_LOCK = 0x6E64_7261_6674
"""Advisory lock key: one process migrates a PostgreSQL database at a time."""


def current_revision(connection: sa.Connection) -> str | None:
    """The revision of the database; None where no migration ever ran."""
    if not sa.inspect(connection).has_table("alembic_version"):
        return None
    revision: str | None = connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar()
    return revision


def is_empty(connection: sa.Connection) -> bool:
    """Whether the database (on PostgreSQL: the current schema) has no table at all."""
    return not sa.inspect(connection).get_table_names()


def upgrade(connection: sa.Connection) -> None:
    """Run the missing migrations and make the views anew, inside the caller's write transaction."""
    if connection.dialect.name == "postgresql":
        allow_migration(connection)
        connection.execute(sa.text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
    revision = current_revision(connection)
    if revision == HEAD:
        return
    _require_known(revision)
    log.info("setting the store up" if revision is None else f"upgrading the store from schema revision {revision}")
    views.drop(connection)
    _migrate(connection)
    views.create(connection)


def upgrade_if_empty(connection: sa.Connection) -> None:
    """Set up a database in which there is nothing yet; leave any other alone."""
    if is_empty(connection):
        upgrade(connection)


def require_head(connection: sa.Connection, name: str) -> None:
    """Raise `SchemaOutdated` unless the database is at the revision that this version needs."""
    revision = current_revision(connection)
    if revision == HEAD:
        return
    _require_known(revision)
    if revision is None:
        raise SchemaOutdated(
            f"the database {name} has tables, but none of nightdraft's; give the store a database (or schema) of its"
            " own, or run `nightdraft db upgrade` to add its tables to this one"
        )
    raise SchemaOutdated(
        f"the store {name} is at schema revision {revision}, this version needs {HEAD}: run `nightdraft db upgrade`"
    )


def _require_known(revision: str | None) -> None:
    if revision is not None and revision not in revisions():
        raise SchemaOutdated(
            f"the store is at schema revision {revision}, which this version does not know:"
            " it was upgraded by a newer nightdraft, so install that one"
        )


# Alembic is imported where it is needed: most commands only ask for the revision.


def revisions() -> list[str]:
    """Every revision that this version knows, the newest first."""
    from alembic.script import ScriptDirectory

    return [script.revision for script in ScriptDirectory(_SCRIPTS).walk_revisions()]


def _migrate(connection: sa.Connection) -> None:
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", _SCRIPTS.replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
