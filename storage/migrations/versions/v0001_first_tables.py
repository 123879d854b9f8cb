"""The first tables: jobs, input files, chunks, results, acceptance, what ran, engine samples."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("spec_hash", sa.String(), nullable=False),
        sa.Column("num_rows", sa.BigInteger(), nullable=False),
        sa.Column("num_samples", sa.Integer(), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("started_at", TIME),
        sa.Column("finished_at", TIME),
        sa.Column("error_code", sa.String()),
        sa.Column("error_message", sa.String()),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
        sa.UniqueConstraint("name", name=op.f("uq_jobs_name")),
    )
    op.create_index(op.f("ix_jobs_created_at"), "jobs", ["created_at"])
    op.create_table(
        "input_files",
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("index", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("path", sa.String(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("modified", sa.String(), nullable=False),
        sa.Column("schema", sa.String(), nullable=False),
        sa.Column("row_groups", sa.JSON(), nullable=False),
        sa.Column("first_row", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_input_files_jobs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "index", name=op.f("pk_input_files")),
    )
    op.create_table(
        "chunks",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("index", sa.Integer(), nullable=False),
        sa.Column("file_index", sa.Integer(), nullable=False),
        sa.Column("start_row", sa.BigInteger(), nullable=False),
        sa.Column("file_row", sa.BigInteger(), nullable=False),
        sa.Column("num_rows", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("worker_id", sa.String()),
        sa.Column("lease_until", TIME),
        sa.Column("dispatched_at", TIME),
        sa.Column("retry_epoch", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("num_ok", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("num_errors", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("num_output_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("num_spec_steps", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("num_draft_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.Column("num_accepted_draft_tokens", sa.BigInteger(), server_default="0", nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_chunks_jobs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_chunks")),
        sa.UniqueConstraint("job_id", "start_row", name=op.f("uq_chunks_job_id_start_row")),
        sqlite_autoincrement=True,
    )
    op.create_index(op.f("ix_chunks_job_id_state_id"), "chunks", ["job_id", "state", "id"])
    op.create_index(op.f("ix_chunks_state_id"), "chunks", ["state", "id"])
    op.create_table(
        "results",
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("row_index", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("sample", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("status", sa.String(), nullable=False),
        sa.Column("output_text", sa.Text()),
        sa.Column("output_bytes", sa.LargeBinary()),
        sa.Column("output_token_ids", sa.JSON()),
        sa.Column("finish_reason", sa.String()),
        sa.Column("error_code", sa.String()),
        sa.Column("error_message", sa.Text()),
        sa.Column("row_id", sa.String()),
        sa.Column("carried", sa.JSON(), nullable=False),
        sa.Column("num_prompt_tokens", sa.Integer()),
        sa.Column("num_output_tokens", sa.Integer()),
        sa.Column("method", sa.String()),
        sa.Column("temperature", sa.Double()),
        sa.Column("seed", sa.String()),
        sa.Column("logprobs", sa.JSON()),
        sa.Column("queue_seconds", sa.Double()),
        sa.Column("first_token_seconds", sa.Double()),
        sa.Column("total_seconds", sa.Double()),
        sa.Column("draft_seconds", sa.Double()),
        sa.Column("verify_seconds", sa.Double()),
        sa.Column("num_preemptions", sa.Integer()),
        sa.Column("recorded_at", TIME, nullable=False),
        sa.CheckConstraint("status <> 'error' OR error_code IS NOT NULL", name=op.f("ck_results_error_code")),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_results_jobs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "row_index", "sample", name=op.f("pk_results")),
    )
    op.create_index(
        "ix_results_errors",
        "results",
        ["job_id", "row_index", "sample"],
        sqlite_where=sa.text("status = 'error'"),
        postgresql_where=sa.text("status = 'error'"),
    )
    op.create_table(
        "acceptance",
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("row_index", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("sample", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("num_spec_steps", sa.Integer(), nullable=False),
        sa.Column("num_draft_tokens", sa.Integer(), nullable=False),
        sa.Column("num_accepted_draft_tokens", sa.Integer(), nullable=False),
        sa.Column("num_trimmed_draft_tokens", sa.Integer(), nullable=False),
        sa.Column("num_output_tokens", sa.Integer(), nullable=False),
        sa.Column("acceptance_histogram", sa.JSON(), nullable=False),
        sa.Column("reached_per_position", sa.JSON(), nullable=False),
        sa.Column("accepted_per_position", sa.JSON(), nullable=False),
        sa.CheckConstraint(
            "num_accepted_draft_tokens + num_trimmed_draft_tokens <= num_draft_tokens",
            name=op.f("ck_acceptance_drafted"),
        ),
        sa.CheckConstraint(
            "num_output_tokens = num_spec_steps + num_accepted_draft_tokens", name=op.f("ck_acceptance_emitted")
        ),
        sa.ForeignKeyConstraint(
            ["job_id", "row_index", "sample"],
            ["results.job_id", "results.row_index", "results.sample"],
            name=op.f("fk_acceptance_results"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("job_id", "row_index", "sample", name=op.f("pk_acceptance")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "models",
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("role", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("content_hash", sa.String(), nullable=False),
        sa.Column("parameters", sa.JSON(), nullable=False),
        sa.Column("report", sa.JSON(), nullable=False),
        sa.Column("recorded_at", TIME, nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_models_jobs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "role", "name", "content_hash", name=op.f("pk_models")),
    )
    op.create_table(
        "speculators",
        sa.Column("job_id", sa.String(), nullable=False),
        sa.Column("method", sa.String(), nullable=False),
        sa.Column("verify", sa.String(), nullable=False),
        sa.Column("parameters", sa.JSON(), nullable=False),
        sa.Column("recorded_at", TIME, nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_speculators_jobs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", "method", "verify", name=op.f("pk_speculators")),
    )
    op.create_table(
        "workers",
        sa.Column("worker_id", sa.String(), nullable=False),
        sa.Column("hostname", sa.String(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("started_at", TIME, nullable=False),
        sa.Column("last_seen", TIME, nullable=False),
        sa.PrimaryKeyConstraint("worker_id", name=op.f("pk_workers")),
    )
    op.create_table(
        "engine_samples",
        sa.Column("worker_id", sa.String(), nullable=False),
        sa.Column("sampled_at", TIME, nullable=False),
        sa.Column("job_id", sa.String()),
        sa.Column("num_running", sa.Integer(), nullable=False),
        sa.Column("num_waiting", sa.Integer(), nullable=False),
        sa.Column("num_kv_blocks_used", sa.Integer(), nullable=False),
        sa.Column("num_kv_blocks", sa.Integer(), nullable=False),
        sa.Column("num_output_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_spec_steps", sa.BigInteger(), nullable=False),
        sa.Column("num_draft_tokens", sa.BigInteger(), nullable=False),
        sa.Column("num_accepted_draft_tokens", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("worker_id", "sampled_at", name=op.f("pk_engine_samples")),
    )
