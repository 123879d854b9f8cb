"""Parquet files, wherever they are: opening them, and what they say about themselves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from storage.errors import InputNotFound, NotParquet
from storage.files.conversion import remedy
from storage.files.locations import arrow_filesystem, stat
from storage.records import InputFile

BUFFER = 1 << 20
"""Bytes read from a file at a time."""


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
        with open_parquet(path) as file:
            metadata = file.metadata
            groups = tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
            return FileMetadata(path, size, modified, file.schema_arrow, groups)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        advice = remedy(path)
        reason = "(another format, or cut off?)" if not advice else "(its name tells of another format)"
        raise NotParquet(f"{path} is not a readable Parquet file {reason}: {error}{advice}") from error


def schema_text(schema: pa.Schema) -> str:
    """One "name: type" per line: how a schema is kept and compared."""
    return "\n".join(f"{field.name}: {field.type}" for field in schema)


def merged_schema(schemas: Iterable[pa.Schema]) -> pa.Schema:
    """The first schema, every field nullable; a column without a value (type null) has the type of a file with one.

    What the first file notes on itself and its columns stays.
    """
    schemas = list(schemas)
    fields = []
    for field in schemas[0]:
        kinds = (s.field(field.name).type for s in schemas if field.name in s.names)
        kind = next((kind for kind in kinds if not pa.types.is_null(kind)), field.type)
        fields.append(field.with_type(kind).with_nullable(True))
    return pa.schema(fields, schemas[0].metadata)


def open_parquet(path: str) -> pq.ParquetFile:
    """An open file, its footer read. Raises `InputNotFound`, and what pyarrow raises for what is no Parquet file."""
    filesystem, inner = arrow_filesystem(path)
    try:
        source = filesystem.open_input_file(inner)
    except FileNotFoundError as error:
        raise InputNotFound(f"there is no file {path}") from error
    return pq.ParquetFile(source, pre_buffer=False, buffer_size=BUFFER, page_checksum_verification=True)
