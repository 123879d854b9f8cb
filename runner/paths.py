"""Files that a command writes: whether it can, before any work is done."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from runner.errors import UsageError
from storage.private import make_folder

OTHER_FORMATS = (
    ".arrow", ".avro", ".csv", ".db", ".feather", ".gz", ".ipc", ".json", ".jsonl", ".ndjson", ".orc", ".sqlite",
    ".tsv", ".txt", ".xls", ".xlsx", ".zip", ".zst",
)  # fmt: skip
"""Endings of names that mean another format than Parquet."""


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
    from storage.files.locations import list_files

    local = [name for name in inputs if "://" not in name]
    if path.exists() and path.resolve() in {Path(file).resolve() for file in list_files(local)}:
        raise UsageError(f"--out {path} is an input file of the job; choose another name")
