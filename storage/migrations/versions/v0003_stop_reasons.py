"""results.stop_reason: which stop string or stop id ended an answer; jobs.notes: what was told of the input;
input_files.partitions: the columns that folders give.

Views are made anew with every revision (`storage.schema.upgrade`).
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("results", sa.Column("stop_reason", sa.Text()))
    op.add_column("jobs", sa.Column("notes", sa.JSON(none_as_null=True), nullable=False, server_default="[]"))
    op.add_column(
        "input_files", sa.Column("partitions", sa.JSON(none_as_null=True), nullable=False, server_default="{}")
    )
