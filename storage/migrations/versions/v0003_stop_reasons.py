"""results.stop_reason: which stop string or stop id ended an answer; jobs.notes: what was told of the input;
input_files.partitions: the columns that folders give; workers: what tells processes apart across containers, and the
one job that a worker may be there for; chunks.in_hand: the row that runs alone; chunks.engine_microseconds:
what its answers took of engines, counted from the results that are there.

Views are made anew with every revision (`storage.sql.revisions.upgrade`).
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


_COUNT = """
UPDATE chunks SET engine_microseconds = coalesce((
    SELECT CAST(sum(round((r.draft_seconds + r.verify_seconds) * 1e6)) AS BIGINT) FROM results AS r
    WHERE r.job_id = chunks.job_id AND r.row_index >= chunks.start_row
        AND r.row_index < chunks.start_row + chunks.num_rows
), 0)"""


def upgrade() -> None:
    op.add_column("results", sa.Column("stop_reason", sa.Text()))
    op.add_column("jobs", sa.Column("notes", sa.JSON(none_as_null=True), nullable=False, server_default="[]"))
    op.add_column(
        "input_files", sa.Column("partitions", sa.JSON(none_as_null=True), nullable=False, server_default="{}")
    )
    for name in ("boot_id", "pid_namespace", "process_start", "job_id"):
        op.add_column("workers", sa.Column(name, sa.String()))
    op.add_column("chunks", sa.Column("in_hand", sa.JSON()))
    op.add_column("chunks", sa.Column("engine_microseconds", sa.BigInteger(), server_default="0", nullable=False))
    op.execute(_COUNT)
