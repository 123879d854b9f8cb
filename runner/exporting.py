"""Where an export goes, and whether it can: what is checked here is checked before any work is done."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from runner.errors import UsageError
from runner.views import nobody_works
from scheduler.recovery import as_seen
from storage.files import SUFFIXES
from storage.private import make_folder
from storage.records import JobState

OTHER_FORMATS = (
    ".arrow", ".avro", ".csv", ".db", ".feather", ".gz", ".ipc", ".json", ".jsonl", ".ndjson", ".orc", ".sqlite",
    ".tsv", ".txt", ".xls", ".xlsx", ".zip", ".zst",
)  # fmt: skip
"""Endings of names that mean another format than Parquet."""

if TYPE_CHECKING:
    from collections.abc import Sequence

    from storage.export import ExportReport
    from storage.records import Job
    from storage.store import Store


def export_to(
    store: Store, job: Job, out: str, *, partial: bool = False, token_ids: bool = False, force: bool = False
) -> ExportReport:
    """Write a job's results to one Parquet file. Raises `UsageError` for token ids that were not kept, and
    for a job that was interrupted unless `partial`; `UnusableOutput` for a file of something else unless `force`."""
    from storage.export import export_job

    job = as_seen(store, job)
    if not partial and job.state is JobState.IN_PROGRESS and store.activity(job.id).nobody:
        raise UsageError(f"job {job.name} was interrupted, and {nobody_works(job.name)}")
    if token_ids and not job.spec.get("keep_token_ids"):
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


def require_parquet(path: Path) -> Path:
    """The path, unless its name says that another format is meant. Raises `UsageError`."""
    if path.suffix.lower() in OTHER_FORMATS:
        raise UsageError(
            f"--out {path}: an export is Parquet, so its name ends in .parquet; `nightdraft sql --out FILE` writes the"
            " rows of a query as .csv or .json"
        )
    return path


def output_file(out: str) -> Path:
    """The local file that --out names. Raises `UsageError` for an empty name, a URL and a directory."""
    if not out.strip():
        raise UsageError("--out is empty: name a file")
    if "://" in out:
        raise UsageError(f"--out {out}: results are written to a local file; copy it there afterwards")
    path = Path(out).expanduser()
    if path.is_dir():
        raise UsageError(f"--out {out} is a directory; name a file in it")
    return path


def require_folder(path: Path) -> None:
    """Make the folder of a file that will be written. Raises `UsageError` when that fails, or writing in it."""
    try:
        make_folder(path.parent)
        with tempfile.TemporaryFile(dir=path.parent):  # permissions alone do not tell: /proc, read-only mounts
            pass
    except OSError as error:
        raise UsageError(f"--out {path}: cannot write in {path.parent}: {error.strerror}") from error


def require_no_input(path: Path, inputs: Sequence[str]) -> None:
    """Raise `UsageError` when a file that will be written is one of the inputs: files, directories or globs."""
    from storage.files import list_files

    local = [name for name in inputs if "://" not in name]
    if path.exists() and path.resolve() in {Path(file).resolve() for file in list_files(local)}:
        raise UsageError(f"--out {path} is an input file of the job; choose another name")
