"""Alembic migrations; run by `storage.sql.revisions.upgrade`."""
