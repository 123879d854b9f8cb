"""results.stop_reason: which stop string or stop id ended an answer.

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
