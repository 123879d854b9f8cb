"""Alembic environment: migrates over the connection, and in the transaction, that `storage.sql.revisions` hands in."""

from __future__ import annotations

from alembic import context

from storage.sql.tables import metadata

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=metadata, render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
