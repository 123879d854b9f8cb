"""Rows of a chunk, read from Parquet a small batch at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from storage.errors import InputChanged, InputNotFound, NotParquet
from storage.files import shown_size, shown_versions
from storage.parquet import read_rows, stat
from storage.records import Chunk, InputFile, InputSpec
from workers.errors import BadRow, UnreadableInput

DEFAULT_SAMPLING_COLUMN = "sampling_params"
BATCH_ROWS = 64


@dataclass(frozen=True, slots=True)
class Row:
    """One input record. `text` is the prompt or the messages, as Arrow gives them."""

    index: int
    """Index in the dataset."""
    text: Any
    sampling: Any = None
    speculation: Any = None
    """Name of a speculation method; None is the job's own."""
    row_id: str | None = None
    carried: dict[str, Any] = field(default_factory=dict)
    """The other columns, as Python values; binary columns are left out, the export takes them from the input file."""
    problem: BadRow | None = None
    """Why the row could not even be decoded."""


def read_chunk(file: InputFile, chunk: Chunk, input_spec: InputSpec) -> Iterator[list[Row]]:
    """The rows of a chunk in order, in lists of at most `BATCH_ROWS`.

    Raises `UnreadableInput` when the file is missing, broken, or not the one that was submitted.
    """
    text_column = _text_column(input_spec)
    expected = chunk.start_row
    try:
        _require_same_version(file)
        for batch in read_rows(file.path, chunk.file_row, chunk.num_rows, None, batch_rows=BATCH_ROWS):
            if text_column not in batch.schema.names:
                raise UnreadableInput(f"{file.path}: column {text_column!r} is no longer there")
            rows = _rows(batch, expected, input_spec)
            expected += len(rows)
            yield rows
    except (InputNotFound, NotParquet, InputChanged, OSError) as error:
        raise UnreadableInput(str(error)) from error


def _require_same_version(file: InputFile) -> None:
    now = stat(file.path)
    if now != (file.size, file.modified):
        was_version, is_version = shown_versions(file.path, file.modified, now[1])
        raise UnreadableInput(
            f"{file.path} changed since the job was submitted: it was {shown_size(file.size)}, version {was_version},"
            f" and is {shown_size(now[0])}, version {is_version}"
        )


def _text_column(spec: InputSpec) -> str:
    column = spec.prompt_column or spec.messages_column
    assert column is not None  # JobSettings sees to it
    return column


def _rows(batch: pa.RecordBatch, first_index: int, spec: InputSpec) -> list[Row]:
    names: list[str] = batch.schema.names
    text_column = _text_column(spec)
    sampling_column = spec.sampling_column or DEFAULT_SAMPLING_COLUMN
    empty: list[Any] = [None] * batch.num_rows
    texts = _values(batch.column(text_column))
    samplings = _values(batch.column(sampling_column)) if sampling_column in names else empty
    speculations = _values(batch.column(spec.speculation_column)) if spec.speculation_column in names else empty
    ids = _values(batch.column(spec.id_column)) if spec.id_column in names else empty
    special = {text_column, sampling_column, spec.speculation_column, spec.id_column}
    carried = _carried(batch, [name for name in names if name not in special])
    return [
        _row(first_index + place, *values)
        for place, values in enumerate(zip(texts, samplings, speculations, ids, carried, strict=True))
    ]


def _row(index: int, text: Any, sampling: Any, speculation: Any, row_id: Any, carried: dict[str, Any]) -> Row:
    problem = next((value for value in (text, sampling, speculation) if isinstance(value, BadRow)), None)
    if problem is not None:
        text = sampling = speculation = None
    return Row(index, text, sampling, speculation, None if row_id is None else str(row_id), carried, problem)


def _values(column: pa.Array[Any]) -> list[Any]:
    """Python values; a value that cannot be decoded becomes the `BadRow` that says so, and the others stay."""
    try:
        values: list[Any] = column.to_pylist()
        return values
    except (ValueError, pa.ArrowException):
        return [_value(scalar) for scalar in column]


def _value(scalar: pa.Scalar[Any]) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        return BadRow("invalid_text", f"the text is not valid UTF-8: {error}")
    except (ValueError, pa.ArrowException):
        return str(scalar.cast(pa.string()))


def _carried(batch: pa.RecordBatch, names: Sequence[str]) -> list[dict[str, Any]]:
    kept = [name for name in names if not _is_binary(batch.schema.field(name).type)]
    if not kept:
        return [{} for _ in range(batch.num_rows)]
    columns = [[None if isinstance(value, BadRow) else value for value in _values(batch.column(n))] for n in kept]
    return [dict(zip(kept, values, strict=True)) for values in zip(*columns, strict=True)]


def _is_binary(arrow_type: pa.DataType) -> bool:
    kinds = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary, pa.types.is_binary_view)
    return any(kind(arrow_type) for kind in kinds)
