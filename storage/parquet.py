"""Parquet files, wherever they are: finding them, their metadata, and reading rows in bounded memory."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from storage.errors import InputChanged, InputNotFound, NotParquet
from storage.files import arrow_filesystem, is_url, shown_size, shown_versions
from storage.files import list_files as list_files
from storage.files import stat as stat
from storage.records import InputFile

BUFFER = 1 << 20
"""Bytes read from a file at a time."""
IDLE_READERS = 6
"""Open files kept between calls, so that chunks read in order do not decode a row group from its start each time."""


@dataclass(frozen=True, slots=True)
class FileMetadata:
    """What a Parquet file says about itself, read without its rows."""

    path: str
    size: int
    modified: str
    schema: pa.Schema
    row_groups: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return sum(self.row_groups)

    def as_input_file(self, index: int, first_row: int) -> InputFile:
        """The record of this file as number `index` of a job's input, its first row being row `first_row`."""
        return InputFile(
            index=index,
            path=self.path,
            size=self.size,
            modified=self.modified,
            schema=schema_text(self.schema),
            row_groups=self.row_groups,
            first_row=first_row,
        )


def read_metadata(path: str) -> FileMetadata:
    """A file's size, version, schema and row groups. Raises `InputNotFound` and `NotParquet`."""
    size, modified = stat(path)
    try:
        with _open(path) as file:
            metadata = file.metadata
            groups = tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
            return FileMetadata(path, size, modified, file.schema_arrow.remove_metadata(), groups)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise NotParquet(f"{path} is not a readable Parquet file (another format, or cut off?): {error}") from error


def schema_text(schema: pa.Schema) -> str:
    """One "name: type" per line: how a schema is kept and compared."""
    return "\n".join(f"{field.name}: {field.type}" for field in schema)


def merged_schema(schemas: Iterable[pa.Schema]) -> pa.Schema:
    """The first schema, every field nullable; a column without a value (type null) has the type of a file with one."""
    schemas = list(schemas)
    fields = []
    for field in schemas[0]:
        kinds = (s.field(field.name).type for s in schemas if field.name in s.names)
        kind = next((kind for kind in kinds if not pa.types.is_null(kind)), field.type)
        fields.append(pa.field(field.name, kind, nullable=True))
    return pa.schema(fields)


def require_unchanged(file: InputFile) -> None:
    """Raise `InputChanged`, naming the file and what changed, unless it is what was submitted."""
    try:
        now = read_metadata(file.path)
    except (InputNotFound, NotParquet) as error:
        raise InputChanged(f"input file {file.path} changed since the job was submitted: {error}") from error
    version = "version" if is_url(file.path) else "modification time"
    differences = [
        f"its {name} was {was} and is {is_now}"
        for name, was, is_now in (
            ("size", shown_size(file.size), shown_size(now.size)),
            ("number of rows", file.num_rows, now.num_rows),
            ("schema", file.schema.replace("\n", ", "), schema_text(now.schema).replace("\n", ", ")),
            ("row groups", file.row_groups, now.row_groups),
            (version, *shown_versions(file.path, file.modified, now.modified)),
        )
        if was != is_now
    ]
    if differences:
        raise InputChanged(
            f"input file {file.path} changed since the job was submitted: {'; '.join(differences)}."
            " Put the old file back, or submit the new one as a new job"
        )


def read_rows(
    path: str, file_row: int, num_rows: int, columns: Sequence[str] | None = None, batch_rows: int = 64
) -> Iterator[pa.RecordBatch]:
    """Rows `file_row` to `file_row + num_rows - 1` of a file, in order, at most `batch_rows` at a time.

    The columns come as asked for; None reads all. Memory is bounded by a few pages per column, whatever the row
    group. A read that starts where an earlier one ended goes on from there. Raises `InputNotFound`, `NotParquet`, and
    `InputChanged` when the file has fewer rows.
    """
    key = (path, *stat(path), None if columns is None else tuple(columns), batch_rows)
    reader = _pool.take(key, file_row) or _Reader(path, columns, batch_rows, file_row)
    try:
        yield from reader.read(file_row, num_rows)
    except (pa.ArrowInvalid, OSError) as error:
        reader.close()
        raise NotParquet(f"{path} cannot be read at row {reader.position}: {error}") from error
    except BaseException:
        reader.close()
        raise
    _pool.put(key, reader)


class _Reader:
    """An open file and the place up to which its rows were taken."""

    def __init__(self, path: str, columns: Sequence[str] | None, batch_rows: int, file_row: int) -> None:
        self.path = path
        self.file = _open(path)
        self.columns = columns
        groups, self.position = self._from_group_of(file_row)
        names = None if columns is None else list(columns)
        self.batches = self.file.iter_batches(batch_rows, row_groups=groups, columns=names, use_threads=False)
        self.rest: pa.RecordBatch | None = None

    def read(self, file_row: int, num_rows: int) -> Iterator[pa.RecordBatch]:
        end = file_row + num_rows
        while self.position < end:
            batch = self._next(end)
            skipped = max(file_row - self.position, 0)
            kept = min(batch.num_rows, end - self.position)
            self.rest = batch.slice(kept) if kept < batch.num_rows else None
            self.position += kept
            if skipped < kept:
                yield batch.slice(skipped, kept - skipped)

    def close(self) -> None:
        self.file.close()

    def _next(self, end: int) -> pa.RecordBatch:
        if self.rest is not None:
            return self.rest
        batch = next(self.batches, None)
        if batch is None:
            raise InputChanged(f"{self.path} has {self.position} rows, rows up to {end} were planned: it changed")
        # Asking for "a" also gives a column named "a.b".
        return batch if self.columns is None else batch.select(list(self.columns))

    def _from_group_of(self, file_row: int) -> tuple[list[int], int]:
        """The row groups from the one that holds a row on, and the first one's first row."""
        metadata = self.file.metadata
        first, start = 0, 0
        while first < metadata.num_row_groups and start + metadata.row_group(first).num_rows <= file_row:
            start += metadata.row_group(first).num_rows
            first += 1
        return list(range(first, metadata.num_row_groups)), start


class _ReaderPool:
    """Readers that nobody uses at the moment, the longest unused first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[tuple[tuple[Any, ...], _Reader]] = []

    def take(self, key: tuple[Any, ...], file_row: int) -> _Reader | None:
        """The idle reader of that file that has the least to skip."""
        with self._lock:
            fitting = [entry for entry in self._idle if entry[0] == key and entry[1].position <= file_row]
            if not fitting:
                return None
            best = max(fitting, key=lambda entry: entry[1].position)
            self._idle.remove(best)
            return best[1]

    def put(self, key: tuple[Any, ...], reader: _Reader) -> None:
        with self._lock:
            self._idle.append((key, reader))
            dropped = [] if len(self._idle) <= IDLE_READERS else [self._idle.pop(0)]
        for _, old in dropped:
            old.close()


_pool = _ReaderPool()


def _open(path: str) -> pq.ParquetFile:
    filesystem, inner = arrow_filesystem(path)
    try:
        source = filesystem.open_input_file(inner)
    except FileNotFoundError as error:
        raise InputNotFound(f"there is no file {path}") from error
    return pq.ParquetFile(source, pre_buffer=False, buffer_size=BUFFER)
