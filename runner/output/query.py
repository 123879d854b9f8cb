"""Rows of a query in the format that was asked for."""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from runner.errors import UsageError
from runner.output.console import json_default, note
from runner.output.output import Table
from runner.paths import output_file, require_folder
from storage.errors import OutputFailed
from storage.files.output import writing
from storage.private import open_file
from storage.store.query import run_sql
from storage.store.store import Store
from storage.suggest import did_you_mean

if TYPE_CHECKING:
    import pyarrow as pa

FORMATS = ("table", "json", "csv", "parquet")
PARQUET_BATCH = 10_000


ENDINGS = {".csv": "csv", ".json": "json", ".parquet": "parquet", ".pq": "parquet", ".parq": "parquet"}
"""Formats that the name of a file asks for."""


def write_query(store: Store, query: str, output_format: str | None, out: str | None, limit: int) -> None:
    """Run one read-only statement and write its rows. Without a format the name of the file tells it.

    Raises `UsageError` for a format that does not fit.
    """
    named = None if out is None else ENDINGS.get(Path(out).suffix.lower())
    if None not in (named, output_format) and named != output_format and output_format in FORMATS:
        raise UsageError(f"--out {out} names a {named} file, and --format says {output_format}: leave one of them out")
    output_format = output_format or named or "table"
    if output_format not in FORMATS:
        near = did_you_mean(output_format, FORMATS)
        raise UsageError(f"unknown format {output_format!r}{near}; there are: {', '.join(FORMATS)}")
    if output_format == "parquet" and out is None:
        raise UsageError("parquet is not for a terminal: add --out FILE.parquet")
    if output_format == "table" and out is not None:
        raise UsageError("a table goes to the terminal: add --format json, csv or parquet to write a file")
    target = None if out is None else _target(out)
    columns, rows = run_sql(store, query)
    if target is None:
        _write(columns, rows, output_format, None, limit)
        return
    is_new = not target.exists()
    try:
        with writing(target):
            _write(columns, rows, output_format, target, limit)
    except OutputFailed:
        if is_new:
            target.unlink(missing_ok=True)
        raise


def _write(
    columns: Sequence[str], rows: Iterator[Sequence[Any]], output_format: str, target: Path | None, limit: int
) -> None:
    if output_format == "table":
        _write_table(columns, rows, limit)
    elif output_format == "parquet":
        assert target is not None
        with open_file(target, "wb") as file:
            _write_parquet(columns, rows, file)
    else:
        with _text_output(target) as stream:
            (_write_json if output_format == "json" else _write_csv)(columns, rows, stream)


def _target(out: str) -> Path:
    """The file, or pipe, that is written. Raises `UsageError` for one that cannot be."""
    path = output_file(out)
    if not path.exists():
        require_folder(path)
    elif not os.access(path, os.W_OK):
        raise UsageError(f"--out {out} cannot be written: no permission")
    return path


def _write_table(columns: Sequence[str], rows: Iterator[Sequence[Any]], limit: int) -> None:
    Table(columns, list(islice(rows, limit))).print()
    if next(rows, None) is not None:
        note(f"the first {limit} rows are shown; --limit N shows more, --format csv writes all")


def _write_json(columns: Sequence[str], rows: Iterator[Sequence[Any]], stream: IO[str]) -> None:
    """A JSON list, written row by row: a query may return more than fits into memory."""
    stream.write("[")
    for index, row in enumerate(rows):
        record = dict(zip(columns, row, strict=True))
        stream.write(",\n " if index else "\n ")
        json.dump(record, stream, ensure_ascii=False, default=json_default)
    stream.write("\n]\n")


def _write_csv(columns: Sequence[str], rows: Iterator[Sequence[Any]], stream: IO[str]) -> None:
    writer = csv.writer(stream)
    writer.writerow(columns)
    writer.writerows(rows)


def _write_parquet(columns: Sequence[str], rows: Iterator[Sequence[Any]], out: IO[bytes]) -> None:
    """The types are those of the first batch; a column that is NULL in all of it becomes text."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    batch = list(islice(rows, PARQUET_BATCH))
    try:
        schema = _schema(columns, batch)
        with pq.ParquetWriter(out, schema) as writer:
            while batch:
                records = [dict(zip(columns, row, strict=True)) for row in batch]
                writer.write_table(pa.Table.from_pylist(records, schema=schema))
                batch = list(islice(rows, PARQUET_BATCH))
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise UsageError(f"a column has values of several types: {error}; CAST it in the query") from error


def _schema(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> pa.Schema:
    import pyarrow as pa

    fields = []
    for index, column in enumerate(columns):
        kind = pa.array([row[index] for row in rows]).type
        fields.append(pa.field(column, pa.string() if pa.types.is_null(kind) else kind))
    return pa.schema(fields)


@contextmanager
def _text_output(target: Path | None) -> Iterator[IO[str]]:
    if target is None:
        yield sys.stdout
        return
    with open_file(target, "w", encoding="utf-8", newline="") as stream:
        yield stream
