"""Alembic migrations; run by `storage.schema.upgrade`."""
