"""The input of a job, looked at before anything is stored or loaded: which files, which columns, how many rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pyarrow as pa

from scheduler.errors import InvalidInput
from scheduler.intake.columns import duplicate_columns, resolve_columns, schema_problems, unwritable_columns
from scheduler.intake.partitions import typed_partitions
from scheduler.intake.remarks import column_remarks, skipped_files
from storage.errors import InputNotFound, NotParquet
from storage.files.locations import ListedFile, Listing, find_files
from storage.files.parquet import FileMetadata, merged_schema, read_metadata
from storage.records import InputFile
from storage.spec import InputSpec

METADATA_THREADS = 8
"""Footers read at the same time: on object stores each one is a round trip or two."""


@dataclass(frozen=True, slots=True)
class Dataset:
    """Parquet files that fit together, and what their columns mean."""

    files: tuple[InputFile, ...]
    """In input order; with a limit, only those that hold a row below it."""
    schema: pa.Schema
    """Columns of all files, in the order of the first; every field is nullable."""
    num_rows: int
    """Rows of the files, or the limit if that is less."""
    input: InputSpec
    """As asked, with the text, sampling and speculation columns settled."""
    notes: tuple[str, ...] = ()
    """What the owner of the input should know, a sentence each."""


def inspect(spec: InputSpec) -> Dataset:
    """Find and check the input from Parquet metadata alone; no row is read.

    Raises `InvalidInput` with everything that is wrong: no files, files that are not Parquet or cut off, schemas that
    clash, columns that are missing, ambiguous, there twice, or of a type that cannot hold what they should.
    """
    if spec.limit is not None and spec.limit < 0:
        raise InvalidInput(f"limit must be 0 or more rows, got {spec.limit}")
    listing = _find(spec.paths)
    found = _read([file.path for file in listing.files], spec.limit)
    problems = [problem for file in found for problem in duplicate_columns(file)]
    problems = problems or list(schema_problems(found))
    if problems:
        raise InvalidInput(*problems)
    schema = merged_schema(file.schema for file in found)
    if problems := list(unwritable_columns(schema)):
        raise InvalidInput(*problems)
    folders = [file.partitions for file in listing.files[: len(found)]]
    partitions = typed_partitions(folders, schema.names)
    files = tuple(_placed(found, partitions))
    total = sum(file.num_rows for file in files)
    num_rows = total if spec.limit is None else min(total, spec.limit)
    settled = resolve_columns(spec, schema)
    clashing = dict.fromkeys(key for keys in folders for key in keys if key in schema.names)
    columns = [*schema.names, *(partitions[0] if partitions else ())]
    notes = (*skipped_files(listing.skipped), *column_remarks(settled, columns, list(clashing)))
    return Dataset(files, schema, num_rows, settled, notes)


def _find(paths: Sequence[str]) -> Listing:
    if not paths:
        raise InvalidInput("no input: name at least one Parquet file, directory or glob")
    found: dict[str, ListedFile] = {}
    skipped: dict[str, None] = {}
    problems = []
    for path in paths:
        try:
            listing = find_files([path])
            for file in listing.files:
                found.setdefault(file.path, file)
            skipped.update(dict.fromkeys(listing.skipped))
        except (InputNotFound, OSError) as error:
            problems.append(str(error))
        except Exception as error:
            # A remote file system raises whatever its driver likes (missing credentials, no such bucket, no network).
            if "://" not in path:
                raise
            problems.append(_remote_problem(path, error))
    if problems:
        raise InvalidInput(*problems)
    return Listing(tuple(found.values()), tuple(name for name in skipped if name not in found))


def _read(paths: list[str], limit: int | None) -> list[FileMetadata]:
    """Metadata of the files in order, up to the one that reaches the limit; at least of one file."""
    found: list[FileMetadata] = []
    problems: list[str] = []
    rows = 0
    for read in _read_each(paths):
        if isinstance(read, str):
            problems.append(read)
            continue
        found.append(read)
        rows += read.num_rows
        if limit is not None and rows >= limit:
            break
    if problems:
        raise InvalidInput(*problems)
    return found


def _read_each(paths: Sequence[str]) -> Iterator[FileMetadata | str]:
    """The metadata of each file, or what is wrong with it; read ahead by a few files only."""
    with ThreadPoolExecutor(METADATA_THREADS) as pool:
        for start in range(0, len(paths), 4 * METADATA_THREADS):
            yield from pool.map(_read_one, paths[start : start + 4 * METADATA_THREADS])


def _read_one(path: str) -> FileMetadata | str:
    try:
        return read_metadata(path)
    except (InputNotFound, NotParquet) as error:
        return str(error)
    except OSError as error:
        return f"{path} cannot be read (no permission, or a damaged footer?): {error}"
    except Exception as error:
        if "://" not in path:
            raise
        return _remote_problem(path, error)


def _remote_problem(path: str, error: Exception) -> str:
    return (
        f"{path} cannot be read: {type(error).__name__}: {error}; check the address, and that this machine has"
        " credentials for it where its driver looks for them"
    )


def _placed(found: Sequence[FileMetadata], partitions: Sequence[dict[str, int | str | None]]) -> Iterator[InputFile]:
    first_row = 0
    for index, (file, of_file) in enumerate(zip(found, partitions, strict=True)):
        yield replace(file.as_input_file(index, first_row), partitions=of_file)
        first_row += file.num_rows
