"""Where an export goes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from runner.errors import UsageError

if TYPE_CHECKING:
    from storage.export import ExportReport
    from storage.records import Job
    from storage.store import Store


def export_to(store: Store, job: Job, out: str, *, partial: bool = False, token_ids: bool = False) -> ExportReport:
    """Write a job's results to one Parquet file. Raises `UsageError` for token ids that were not kept."""
    from storage.export import export_job

    if token_ids and not job.spec.get("keep_token_ids"):
        raise UsageError(f"job {job.name} kept no token ids; submit it with keep_token_ids: true")
    if "://" not in out:
        Path(out).expanduser().parent.mkdir(parents=True, exist_ok=True)
    return export_job(store, job.id, out, token_ids=token_ids, partial=partial)


def export_path(out: str, job_name: str) -> str:
    """File that `run --out` writes: `out` itself when it names a Parquet file, else a file in that directory."""
    return out if out.endswith(".parquet") else f"{out.rstrip('/')}/{job_name}.parquet"
