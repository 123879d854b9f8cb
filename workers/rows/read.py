"""Rows of a chunk, read from Parquet a small batch at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from storage.errors import InputChanged, InputNotFound, NotParquet
from storage.files.changes import require_same_version
from storage.files.scanning import Unreadable, read_rows
from storage.records import Chunk, InputFile
from storage.spec import InputSpec
from workers.errors import BadRow, InvalidSpec, UnreadableInput
from workers.rows.carried import carried_rows, row_id
from workers.rows.values import values

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
    """The other columns, as Python values, without binary and very large ones (see `workers.rows.carried`)."""
    problem: BadRow | None = None
    """Why the row could not even be decoded."""


def read_chunk(file: InputFile, chunk: Chunk, input_spec: InputSpec) -> Iterator[list[Row]]:
    """The rows of a chunk in order, in lists of at most `BATCH_ROWS`.

    Rows whose page is damaged have a `problem`. Raises `UnreadableInput` when the file is missing, not readable at all,
    or not the one that was submitted, and `InvalidSpec` without exactly one text column.
    """
    text_column = _text_column(input_spec)
    expected = chunk.start_row
    try:
        require_same_version(file)
        for batch in read_rows(file.path, chunk.file_row, chunk.num_rows, None, batch_rows=BATCH_ROWS):
            found = batch.rows if isinstance(batch, Unreadable) else batch
            if text_column not in found.schema.names:
                raise UnreadableInput(f"{file.path}: column {text_column!r} is no longer there")
            rows = _rows(found, expected, input_spec)
            if isinstance(batch, Unreadable):
                rows = _unreadable(file, batch, rows, input_spec)
            if file.partitions:
                rows = [replace(row, carried={**row.carried, **file.partitions}) for row in rows]
            expected += len(rows)
            yield rows
    except InputChanged as error:
        raise UnreadableInput(error.line) from error
    except (InputNotFound, NotParquet, OSError) as error:
        raise UnreadableInput(str(error)) from error


def _text_column(spec: InputSpec) -> str:
    if spec.text_column is None:
        raise InvalidSpec("input: exactly one of prompt_column and messages_column must be set")
    return spec.text_column


def _rows(batch: pa.RecordBatch, first_index: int, spec: InputSpec) -> list[Row]:
    names: list[str] = batch.schema.names
    text_column = _text_column(spec)
    empty: list[Any] = [None] * batch.num_rows
    texts = values(batch.column(text_column))
    samplings = values(batch.column(spec.sampling_column)) if spec.sampling_column in names else empty
    speculations = values(batch.column(spec.speculation_column)) if spec.speculation_column in names else empty
    ids = values(batch.column(spec.id_column)) if spec.id_column in names else empty
    special = {text_column, spec.sampling_column, spec.speculation_column, spec.id_column}
    carried = carried_rows(batch, [name for name in names if name not in special])
    return [
        _row(first_index + place, *of_row)
        for place, of_row in enumerate(zip(texts, samplings, speculations, ids, carried, strict=True))
    ]


def _row(index: int, text: Any, sampling: Any, speculation: Any, given_id: Any, carried: dict[str, Any]) -> Row:
    problem = next((given for given in (text, sampling, speculation) if isinstance(given, BadRow)), None)
    if problem is not None:
        text = sampling = speculation = None
    return Row(index, text, sampling, speculation, row_id(given_id), carried, problem)


def _unreadable(file: InputFile, damaged: Unreadable, rows: list[Row], spec: InputSpec) -> list[Row]:
    """The rows as they are if only columns are damaged that generating them does not need, else as errors."""
    needed = {_text_column(spec), spec.sampling_column, spec.speculation_column}
    lost = [name for name in damaged.columns if name in needed]
    if not lost:
        return rows
    problem = BadRow(
        "unreadable_input",
        f"column {lost[0]!r} of {file.path} is damaged in this row, or in its row group before it: {damaged.reason}",
    )
    return [replace(row, text=None, sampling=None, speculation=None, problem=problem) for row in rows]
