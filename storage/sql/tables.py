"""The tables, as SQLAlchemy Core metadata. Migrations create them; a test keeps the two equal."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

import sqlalchemy as sa

from storage.records import COUNTS, TOKEN_COUNTS, ChunkState, JobState, RowStatus

metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)


class UtcTime(sa.TypeDecorator[datetime]):
    """A point in time: timezone-aware UTC in Python, timestamptz on PostgreSQL, ISO text in UTC on SQLite."""

    impl = sa.DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"{value!r} has no time zone; times in the store are UTC")
        return value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: sa.Dialect) -> datetime | None:
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class State(sa.TypeDecorator[StrEnum]):
    """A string enum, stored as its value."""

    impl = sa.String
    cache_ok = True

    def __init__(self, enum: type[StrEnum]) -> None:
        super().__init__()
        self.enum = enum

    def process_bind_param(self, value: StrEnum | None, dialect: sa.Dialect) -> str | None:
        return None if value is None else self.enum(value).value

    def process_result_value(self, value: Any | None, dialect: sa.Dialect) -> StrEnum | None:
        return None if value is None else self.enum(value)


BigId = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
Json = sa.JSON(none_as_null=True)


def _job_id(**options: Any) -> sa.Column[str]:
    return sa.Column("job_id", sa.String, sa.ForeignKey("jobs.id", ondelete="CASCADE"), nullable=False, **options)


jobs = sa.Table(
    "jobs",
    metadata,
    sa.Column("id", sa.String, primary_key=True),
    sa.Column("name", sa.String, nullable=False, unique=True),
    sa.Column("state", State(JobState), nullable=False),
    sa.Column("spec", Json, nullable=False),
    sa.Column("spec_hash", sa.String, nullable=False),
    sa.Column("num_rows", sa.BigInteger, nullable=False),
    sa.Column("num_samples", sa.Integer, nullable=False),
    sa.Column("created_at", UtcTime, nullable=False),
    sa.Column("started_at", UtcTime),
    sa.Column("finished_at", UtcTime),
    sa.Column("error_code", sa.String),
    sa.Column("error_message", sa.String),
    sa.Column("notes", Json, nullable=False, server_default="[]"),
    sa.Index(None, "created_at"),
)

input_files = sa.Table(
    "input_files",
    metadata,
    _job_id(primary_key=True),
    sa.Column("index", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("path", sa.String, nullable=False),
    sa.Column("size", sa.BigInteger, nullable=False),
    sa.Column("modified", sa.String, nullable=False),
    sa.Column("schema", sa.String, nullable=False),
    sa.Column("row_groups", Json, nullable=False),
    sa.Column("first_row", sa.BigInteger, nullable=False),
    sa.Column("partitions", Json, nullable=False, server_default="{}"),
)

chunks = sa.Table(
    "chunks",
    metadata,
    sa.Column("id", BigId, primary_key=True),
    _job_id(),
    sa.Column("index", sa.Integer, nullable=False),
    sa.Column("file_index", sa.Integer, nullable=False),
    sa.Column("start_row", sa.BigInteger, nullable=False),
    sa.Column("file_row", sa.BigInteger, nullable=False),
    sa.Column("num_rows", sa.BigInteger, nullable=False),
    sa.Column("state", State(ChunkState), nullable=False),
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("worker_id", sa.String),
    sa.Column("lease_until", UtcTime),
    sa.Column("dispatched_at", UtcTime),
    # Errors recorded under an epoch below this one are due to be generated again.
    sa.Column("retry_epoch", sa.BigInteger, nullable=False, server_default="0"),
    # The row that runs alone, with its row_id and carried columns: what its record needs should it kill its worker.
    sa.Column("in_hand", Json),
    # Counters over the recorded results, kept in the transaction that records them: progress never scans results.
    *(sa.Column(name, sa.BigInteger, nullable=False, server_default="0") for name in COUNTS),
    sa.UniqueConstraint("job_id", "start_row"),
    sa.Index(None, "state", "id"),
    sa.Index(None, "job_id", "state", "id"),
    sqlite_autoincrement=True,
)

results = sa.Table(
    "results",
    metadata,
    _job_id(primary_key=True),
    sa.Column("row_index", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("sample", sa.Integer, primary_key=True, autoincrement=False),
    # The chunk's epoch under which this was recorded.
    sa.Column("epoch", sa.BigInteger, nullable=False),
    sa.Column("status", State(RowStatus), nullable=False),
    sa.Column("output_text", sa.Text),
    # UTF-8 of the output, only where it holds characters that a database text cannot (see storage.sql.encoding).
    sa.Column("output_bytes", sa.LargeBinary),
    sa.Column("output_token_ids", Json),
    sa.Column("finish_reason", sa.String),
    # The stop string, or the digits of the stop id.
    sa.Column("stop_reason", sa.Text),
    sa.Column("error_code", sa.String),
    sa.Column("error_message", sa.Text),
    sa.Column("row_id", sa.String),
    sa.Column("carried", Json, nullable=False),
    sa.Column("num_prompt_tokens", sa.Integer),
    sa.Column("num_output_tokens", sa.Integer),
    sa.Column("method", sa.String),
    sa.Column("temperature", sa.Double),
    # Decimal digits: seeds reach from -2**63 to 2**64 - 1, which no SQL integer holds.
    sa.Column("seed", sa.String),
    sa.Column("logprobs", Json),
    sa.Column("queue_seconds", sa.Double),
    sa.Column("first_token_seconds", sa.Double),
    sa.Column("total_seconds", sa.Double),
    sa.Column("draft_seconds", sa.Double),
    sa.Column("verify_seconds", sa.Double),
    sa.Column("num_preemptions", sa.Integer),
    sa.Column("recorded_at", UtcTime, nullable=False),
    sa.CheckConstraint("status <> 'error' OR error_code IS NOT NULL", name="error_code"),
)
sa.Index(
    "ix_results_errors",
    results.c.job_id,
    results.c.row_index,
    results.c.sample,
    sqlite_where=results.c.status == sa.literal_column("'error'"),
    postgresql_where=results.c.status == sa.literal_column("'error'"),
)

acceptance = sa.Table(
    "acceptance",
    metadata,
    sa.Column("job_id", sa.String, primary_key=True),
    sa.Column("row_index", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("sample", sa.Integer, primary_key=True, autoincrement=False),
    *(sa.Column(name, sa.Integer, nullable=False) for name in TOKEN_COUNTS),
    sa.Column("num_trimmed_draft_tokens", sa.Integer, nullable=False),
    sa.Column("acceptance_histogram", Json, nullable=False),
    sa.Column("reached_per_position", Json, nullable=False),
    sa.Column("accepted_per_position", Json, nullable=False),
    sa.ForeignKeyConstraint(
        ["job_id", "row_index", "sample"],
        ["results.job_id", "results.row_index", "results.sample"],
        ondelete="CASCADE",
    ),
    sa.CheckConstraint("num_output_tokens = num_spec_steps + num_accepted_draft_tokens", name="emitted"),
    sa.CheckConstraint("num_accepted_draft_tokens + num_trimmed_draft_tokens <= num_draft_tokens", name="drafted"),
    sqlite_with_rowid=False,
)

SAME_RESULT = sa.and_(
    acceptance.c.job_id == results.c.job_id,
    acceptance.c.row_index == results.c.row_index,
    acceptance.c.sample == results.c.sample,
)
"""Joins a result with its acceptance statistics."""

models = sa.Table(
    "models",
    metadata,
    _job_id(primary_key=True),
    sa.Column("role", sa.String, primary_key=True),
    sa.Column("name", sa.String, primary_key=True),
    sa.Column("content_hash", sa.String, primary_key=True),
    sa.Column("parameters", Json, nullable=False),
    sa.Column("report", Json, nullable=False),
    sa.Column("recorded_at", UtcTime, nullable=False),
)

speculators = sa.Table(
    "speculators",
    metadata,
    _job_id(primary_key=True),
    sa.Column("method", sa.String, primary_key=True),
    sa.Column("verify", sa.String, primary_key=True),
    sa.Column("parameters", Json, nullable=False),
    sa.Column("recorded_at", UtcTime, nullable=False),
)

workers = sa.Table(
    "workers",
    metadata,
    sa.Column("worker_id", sa.String, primary_key=True),
    sa.Column("hostname", sa.String, nullable=False),
    sa.Column("pid", sa.Integer, nullable=False),
    sa.Column("started_at", UtcTime, nullable=False),
    sa.Column("last_seen", UtcTime, nullable=False),
    sa.Column("boot_id", sa.String),
    sa.Column("pid_namespace", sa.String),
    sa.Column("process_start", sa.String),
    # The one job that the process works on; NULL: on any.
    sa.Column("job_id", sa.String),
)

engine_samples = sa.Table(
    "engine_samples",
    metadata,
    sa.Column("worker_id", sa.String, primary_key=True),
    sa.Column("sampled_at", UtcTime, primary_key=True),
    sa.Column("job_id", sa.String),
    sa.Column("num_running", sa.Integer, nullable=False),
    sa.Column("num_waiting", sa.Integer, nullable=False),
    sa.Column("num_kv_blocks_used", sa.Integer, nullable=False),
    sa.Column("num_kv_blocks", sa.Integer, nullable=False),
    *(sa.Column(name, sa.BigInteger, nullable=False) for name in TOKEN_COUNTS),
)
