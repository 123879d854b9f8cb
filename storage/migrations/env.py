"""Alembic environment: migrates over the connection, and inside the transaction, that `storage.schema` hands in."""

from __future__ import annotations

from alembic import context

from storage.tables import metadata

connection = context.config.attributes["connection"]
context.configure(connection=connection, target_metadata=metadata, render_as_batch=True)
with context.begin_transaction():
    context.run_migrations()
