"""Writing a job's results to one Parquet file, in input order, beside every input column."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import sqlalchemy as sa

from storage.errors import InputChanged, JobNotFinished, UnusableOutput
from storage.files.arrow_types import exported_type, to_plain
from storage.files.changes import require_unchanged
from storage.files.output import writing
from storage.files.parquet import merged_schema, read_metadata
from storage.files.scanning import Unreadable, read_rows
from storage.private import open_file
from storage.records import InputFile, Job, RowStatus
from storage.sql.tables import SAME_RESULT, acceptance, results
from storage.store.rows import SPECULATION_COUNTS, output_text
from storage.store.store import Store

PARTIAL = "Or export without it: --partial exports its rows without their input columns."

SLICE_ROWS = 1024
"""Input rows joined with their results at a time."""
SLICE_BYTES = 16 << 20
GROUP_ROWS = 65536
"""Rows in a row group of the file written, at most."""
GROUP_BYTES = 64 << 20

RESULT_FIELDS = (
    pa.field("_row_index", pa.int64(), nullable=False),
    pa.field("_sample", pa.int32(), nullable=False),
    pa.field("_status", pa.string(), nullable=False),
    pa.field("_error_code", pa.string()),
    pa.field("_error_message", pa.string()),
    pa.field("output_text", pa.string()),
    pa.field("finish_reason", pa.string()),
    pa.field("stop_reason", pa.string()),
    pa.field("num_prompt_tokens", pa.int32()),
    pa.field("num_output_tokens", pa.int32()),
    pa.field("num_spec_steps", pa.int32()),
    pa.field("num_draft_tokens", pa.int32()),
    pa.field("num_accepted_draft_tokens", pa.int32()),
)
TOKEN_FIELDS = (
    pa.field("output_token_ids", pa.list_(pa.int32())),
    pa.field("logprobs", pa.string()),
)
"""Written on request. Log-probabilities come as the JSON that is stored."""

JOB_KEY = b"nightdraft.job"
"""Key of an export's metadata under which the id of its job stands."""
_LISTS_OF_COLUMNS = (b"org.apache.spark.sql.parquet.row.metadata", b"parquet.avro.schema", b"iceberg.schema")


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What an export wrote."""

    path: str
    num_rows: int
    """Rows in the file: one per recorded (row, sample)."""
    num_ok: int
    num_errors: int
    num_missing: int
    """(row, sample) pairs without a record; 0 for a completed job."""
    num_bytes: int
    renamed: dict[str, str]
    """Input columns that had the name of a result column, and the names that they have in the file."""
    num_unreadable: int = 0
    """Input rows of which a column is null in the file because it cannot be read any more: its page is damaged, or its
    file is lost."""
    lost_files: tuple[str, ...] = ()
    """Input files that are not there any more, or were changed, and how: none of their columns is in the export."""


def export_job(
    store: Store, job_id: str, out: str, *, token_ids: bool = False, partial: bool = False, force: bool = False
) -> ExportReport:
    """Write the recorded results of a job, by (row, sample), to the Parquet file `out`.

    Every input column keeps its name and type; one that is named like a result column is kept as "input_" + name.
    The file appears whole or not at all. Memory stays bounded. Raises
    `OutputFailed` where it does not fit, `JobNotFinished` unless the job has ended or
    `partial` is set, and `InputChanged` when an input file is not what was submitted; with `partial` its rows have null
    in the input columns; and `UnusableOutput` where something else stands than an export of this job, unless `force`.
    """
    job = store.jobs.get(job_id)
    target = Path(out).expanduser()
    require_replaceable(target, job, force=force)
    if not job.state.terminal and not partial:
        raise JobNotFinished(
            f"job {job.name!r} is {job.state.value}; wait until it has ended, or ask for the partial results"
        )
    files = store.jobs.files(job.id)
    lost = dict(_lost(files, partial=partial))
    usable = [file for file in files if file.index not in lost]
    # A file may have the columns in another order than the first, as another text type, or required.
    source = merged_schema(read_metadata(file.path).schema for file in usable) if usable else pa.schema([])
    fields = (*RESULT_FIELDS, *(TOKEN_FIELDS if token_ids else ()))
    given = [*source, *_partition_fields(files)]
    renamed = renamed_columns([field.name for field in given], token_ids=token_ids)
    columns = [
        field.with_name(renamed.get(field.name, field.name)).with_type(exported_type(field.type)) for field in given
    ]
    metadata = {**kept_metadata(source.metadata, renamed), JOB_KEY: job.id.encode()}
    schema = pa.schema([*columns, *fields], metadata)
    _require_usable(target, out, files)
    num_unreadable = 0
    with _Writer(target, schema) as writer:
        for piece in _slices(files, lost, job.num_rows, source):
            num_unreadable += piece.num_damaged
            for joined in _joined(store, job.id, piece, fields, schema):
                writer.add(joined)
        for file in usable:
            require_unchanged(file)
    return ExportReport(
        path=str(target),
        num_rows=writer.num_rows,
        num_ok=writer.num_ok,
        num_errors=writer.num_rows - writer.num_ok,
        num_missing=job.num_rows * job.num_samples - writer.num_rows,
        num_bytes=target.stat().st_size,
        renamed=renamed,
        num_unreadable=num_unreadable,
        lost_files=tuple(lost.values()),
    )


def _lost(files: Sequence[InputFile], *, partial: bool) -> Iterator[tuple[int, str]]:
    """The files that are not what they were, and what happened to them; without `partial` the first one is raised."""
    for file in files:
        try:
            require_unchanged(file)
        except InputChanged as error:
            if not partial:
                raise InputChanged(error.headline, error.differences, f"{error.advice} {PARTIAL}".strip()) from error
            yield file.index, error.line


def require_replaceable(target: Path, job: Job, *, force: bool = False) -> None:
    """Raise `UnusableOutput` where something stands that is no export of this job, unless `force`."""
    if force or not target.is_file():
        return
    try:
        of_job = (pq.read_schema(target).metadata or {}).get(JOB_KEY)
    except (pa.ArrowException, OSError):
        of_job = None
    if of_job != job.id.encode():
        what = "another file" if of_job is None else "the export of another job"
        raise UnusableOutput(f"{target} is {what}, not an export of job {job.name!r}: name a new file, or add --force")


def _require_usable(target: Path, out: str, files: Sequence[InputFile]) -> None:
    if "://" in out:
        raise UnusableOutput(f"an export is written to a local file, not to {out}; copy it there afterwards")
    if target.is_dir() or not target.parent.is_dir():
        raise UnusableOutput(f"{out} is a directory, or its directory does not exist; name a file in an existing one")
    if str(target.resolve()) in {str(Path(file.path).resolve()) for file in files}:
        raise UnusableOutput(f"{out} is an input file of the job; choose another name")


class _Writer:
    """A Parquet file that takes its name when it is whole."""

    def __init__(self, target: Path, schema: pa.Schema) -> None:
        self.target = target
        self.temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
        self.schema = schema
        self.num_rows = 0
        self.num_ok = 0
        self._held: list[pa.Table] = []

    def __enter__(self) -> _Writer:
        with writing(self.target):
            self._file = open_file(self.temporary, "wb")
            with suppress(OSError):
                # What is replaced keeps its permissions.
                self.temporary.chmod(self.target.stat().st_mode & 0o777)
            try:
                self._parquet = pq.ParquetWriter(self._file, self.schema, compression="zstd")
            except BaseException:
                self._discard()
                raise
        return self

    def add(self, table: pa.Table) -> None:
        if not table.num_rows:
            return
        self._held.append(table)
        self.num_rows += table.num_rows
        self.num_ok += table["_status"].to_pylist().count(RowStatus.OK.value)
        if (
            sum(held.num_rows for held in self._held) >= GROUP_ROWS
            or sum(held.nbytes for held in self._held) >= GROUP_BYTES
        ):
            self._flush()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            if kind is None:
                self._flush()
                with writing(self.target):
                    self._parquet.close()
                    self._file.flush()
                    os.fsync(self._file.fileno())
                    self._file.close()
                    self.temporary.replace(self.target)
                    _sync_directory(self.target.parent)
        finally:
            if not self._file.closed:
                with suppress(OSError):  # its footer may not fit either
                    self._parquet.close()
                self._parquet.is_open = False  # or its destructor tries again
            self._discard()

    def _discard(self) -> None:
        with suppress(OSError):
            self._file.close()
        self.temporary.unlink(missing_ok=True)

    def _flush(self) -> None:
        if self._held:
            with writing(self.target):
                self._parquet.write_table(pa.concat_tables(self._held).unify_dictionaries())
            self._held.clear()


def _sync_directory(directory: Path) -> None:
    """Make a rename in a directory last through a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def renamed_columns(columns: Sequence[str], *, token_ids: bool = False) -> dict[str, str]:
    """The input columns that are named like a result column, and the names that they have in an export."""
    taken = {field.name for field in (*RESULT_FIELDS, *(TOKEN_FIELDS if token_ids else ()))}
    used = {*columns, *taken}
    renamed: dict[str, str] = {}
    for name in columns:
        if name in taken:
            new = f"input_{name}"
            while new in used:
                new = f"input_{new}"
            renamed[name] = new
            used.add(new)
    return renamed


def kept_metadata(metadata: dict[bytes, bytes] | None, renamed: dict[str, str]) -> dict[bytes, bytes]:
    """The input's own notes, as they are true of an export, which has other rows and more columns.

    What lists the columns for a reader that would then not see the results is left out. Of pandas' notes those on
    columns stay; an index is a column like the others, since a range of row numbers would number other rows.
    """
    kept = {key: value for key, value in (metadata or {}).items() if key not in _LISTS_OF_COLUMNS}
    if b"pandas" in kept:
        try:
            kept[b"pandas"] = json.dumps(_without_index(json.loads(kept[b"pandas"]), renamed)).encode()
        except (ValueError, TypeError, AttributeError, KeyError):
            del kept[b"pandas"]
    return kept


def _without_index(notes: dict[str, Any], renamed: dict[str, str]) -> dict[str, Any]:
    index = {entry for entry in notes["index_columns"] if isinstance(entry, str)}
    columns = [column for column in notes["columns"] if column["field_name"] not in {*index, *renamed}]
    return {**notes, "index_columns": [], "columns": columns}


@dataclass(frozen=True, slots=True)
class _Slice:
    """A few input rows."""

    first_row: int
    num_rows: int
    table: pa.Table
    """Their columns; those that pyarrow cannot pick rows from are in another layout."""
    num_damaged: int


def _slices(files: Sequence[InputFile], lost: Collection[int], limit: int, source: pa.Schema) -> Iterator[_Slice]:
    """The input's first `limit` rows in pieces of bounded size."""
    partitions = _partition_fields(files)
    for file in files:
        wanted = max(min(file.num_rows, limit - file.first_row), 0)
        first = file.first_row
        batches = _nulls(source, wanted) if file.index in lost else read_rows(file.path, 0, wanted)
        for batches_of_slice in _in_slices(batches):
            rows = [batch.rows if isinstance(batch, Unreadable) else batch for batch in batches_of_slice]
            # Batches with a damaged row have a schema of their own.
            alike = (pa.Table.from_batches(list(run)) for _, run in groupby(rows, lambda batch: batch.schema))
            tables = [_with_partitions(_same(table, source), file, partitions) for table in alike]
            damaged = sum(batch.rows.num_rows for batch in batches_of_slice if isinstance(batch, Unreadable))
            num_rows = sum(batch.num_rows for batch in rows)
            yield _Slice(first, num_rows, pa.concat_tables(tables), damaged)
            first += num_rows


def _in_slices(batches: Iterable[pa.RecordBatch | Unreadable]) -> Iterator[list[pa.RecordBatch | Unreadable]]:
    held: list[pa.RecordBatch | Unreadable] = []
    rows = size = 0
    for batch in batches:
        held.append(batch)
        found = batch.rows if isinstance(batch, Unreadable) else batch
        rows, size = rows + found.num_rows, size + found.nbytes
        if rows >= SLICE_ROWS or size >= SLICE_BYTES:
            yield held
            held, rows, size = [], 0, 0
    if held:
        yield held


def _nulls(source: pa.Schema, num_rows: int) -> Iterator[Unreadable]:
    """Rows of a file that is lost."""
    for start in range(0, num_rows, SLICE_ROWS):
        length = min(SLICE_ROWS, num_rows - start)
        columns = [pa.nulls(length, field.type) for field in source]
        # A batch without a column has no length otherwise.
        rows = pa.RecordBatch.from_arrays([*columns, pa.nulls(length)], names=[*source.names, ""])
        yield Unreadable(rows, tuple(source.names), "the file is lost")


def _same(table: pa.Table, source: pa.Schema) -> pa.Table:
    """The columns in the order and of the types of the first file, without views."""
    columns = [to_plain(column) for column in _chunks(table.select(source.names).cast(source))]
    return pa.Table.from_arrays(columns, names=source.names)


def _partition_fields(files: Sequence[InputFile]) -> list[pa.Field]:
    """The columns that folders give, which all files of a job have in common."""
    kinds: dict[str, pa.DataType] = {}
    for file in files:
        for key, value in file.partitions.items():
            kind = pa.int64() if isinstance(value, int) else pa.string()
            if value is not None or key not in kinds:
                kinds[key] = kind
    return [pa.field(key, kind) for key, kind in kinds.items()]


def _with_partitions(table: pa.Table, file: InputFile, fields: Sequence[pa.Field]) -> pa.Table:
    for field in fields:
        value = pa.scalar(file.partitions.get(field.name), field.type)
        table = table.append_column(field, pa.repeat(value, table.num_rows))
    return table


def _chunks(table: pa.Table) -> Iterator[pa.Array]:
    for column in table.columns:
        yield column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _joined(store: Store, job_id: str, piece: _Slice, fields: Sequence[Any], schema: pa.Schema) -> Iterator[pa.Table]:
    """The input rows that have a record, once per sample, with the result columns behind them, in tables of about
    `SLICE_BYTES` however many samples repeat a large row."""
    first_row, table = piece.first_row, piece.table
    found = store.database.read(_recorded, job_id, first_row, first_row + piece.num_rows)
    per_row = table.nbytes // max(piece.num_rows, 1)
    step = max(SLICE_BYTES // max(per_row, 1), 1)
    for start in range(0, len(found), step):
        rows = found[start : start + step]
        places = pa.array([row.row_index - first_row for row in rows], pa.int64())
        picked = table.take(places) if table.num_columns else table
        kept = [
            column if column.type == field.type else column.cast(field.type)
            for column, field in zip(picked.columns, schema, strict=False)
        ]
        results_of = [pa.array([_value(row, field.name) for row in rows], field.type) for field in fields]
        yield pa.Table.from_arrays([*kept, *results_of], schema=schema)


def _recorded(connection: sa.Connection, job_id: str, first: int, end: int) -> Sequence[Any]:
    counts = (acceptance.c[name] for name in SPECULATION_COUNTS)
    query = (
        sa.select(
            results.c.row_index,
            results.c.sample,
            results.c.status,
            results.c.error_code,
            results.c.error_message,
            results.c.output_text,
            results.c.output_bytes,
            results.c.finish_reason,
            results.c.stop_reason,
            results.c.num_prompt_tokens,
            results.c.num_output_tokens,
            results.c.output_token_ids,
            sa.cast(results.c.logprobs, sa.Text).label("logprobs"),
            *counts,
        )
        .select_from(results.outerjoin(acceptance, SAME_RESULT))
        .where(results.c.job_id == job_id, results.c.row_index >= first, results.c.row_index < end)
        .order_by(results.c.row_index, results.c.sample)
    )
    return connection.execute(query).all()


def _value(row: Any, name: str) -> Any:
    if name == "output_text":
        return output_text(row)
    if name == "_status":
        return row.status.value
    return getattr(row, name.removeprefix("_"))
