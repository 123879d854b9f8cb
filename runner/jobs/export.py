"""Where an export goes, and whether it can: what is checked here is checked before any work is done."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from runner.errors import UsageError
from runner.output.jobs import nobody_works
from runner.paths import output_file, require_folder, require_parquet
from scheduler.daemon.recovery import as_seen
from storage.files.locations import SUFFIXES
from storage.records import JobState

if TYPE_CHECKING:
    from storage.files.export import ExportReport
    from storage.records import Job
    from storage.store.store import Store


def export_to(
    store: Store, job: Job, out: str, *, partial: bool = False, token_ids: bool = False, force: bool = False
) -> ExportReport:
    """Write a job's results to one Parquet file. Raises `UsageError` for token ids that were not kept, and
    for a job that was interrupted unless `partial`; `UnusableOutput` for a file of something else unless `force`."""
    from storage.files.export import export_job

    job = as_seen(store, job)
    if not partial and job.state is JobState.IN_PROGRESS and store.telemetry.activity(job.id).nobody:
        raise UsageError(f"job {job.name} was interrupted, and {nobody_works(job.name)}")
    if token_ids and not job.spec.keep_token_ids:
        raise UsageError(f"job {job.name} kept no token ids; submit it with keep_token_ids: true")
    require_folder(require_parquet(output_file(out)))
    return export_job(store, job.id, out, token_ids=token_ids, partial=partial, force=force)


def export_path(out: str, job_name: str) -> str:
    """File that `run --out` writes: `out` itself when it names a Parquet file, else a file in that directory."""
    if not out or out.lower().endswith(SUFFIXES):
        return out
    if not Path(out).expanduser().is_dir():
        require_parquet(Path(out))
    return f"{out.rstrip('/')}/{job_name}.parquet"
