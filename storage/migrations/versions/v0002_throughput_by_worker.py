"""engine_throughput takes the differences of a worker's readings, whatever jobs they belong to.

The tables stay as they are. Views are made anew with every revision (`storage.sql.revisions.upgrade`).
"""

from __future__ import annotations

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    pass
