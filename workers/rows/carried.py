"""The columns of a row that are kept in SQL beside its result: bounded, whatever the input holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from workers.errors import BadRow
from workers.rows.values import value, values

MAX_VALUE_BYTES = 4 << 10
"""A carried value of more bytes stays in the input file, where the export reads it."""
MAX_ROW_BYTES = 32 << 10
"""Bytes of all carried values of a row; the ones behind that, in the order of the columns, stay in the input file."""
MEASURED_BYTES = 1 << 20
"""Below this a column of lists is looked at value by value."""
LEFT_IN_INPUT = {"left_in_input": True}
"""What SQL has in the place of such a value."""
MAX_ID_BYTES = 1 << 10
"""A longer row id is kept up to here, with an ellipsis behind it."""


def carried_rows(batch: pa.RecordBatch, names: Sequence[str]) -> list[dict[str, Any]]:
    """The named columns of each row as Python values; binary columns are left out."""
    room = [MAX_ROW_BYTES] * batch.num_rows
    rows: list[dict[str, Any]] = [{} for _ in room]
    for name in names:
        if is_binary(batch.schema.field(name).type):
            continue
        for row, kept in enumerate(_bounded(batch.column(name), room)):
            rows[row][name] = kept
    return rows


def row_id(given: Any) -> str | None:
    """The row id as it is stored."""
    if given is None or isinstance(given, BadRow):
        return None
    text = str(given)
    if len(text) <= MAX_ID_BYTES // 4 or len(text.encode(errors="replace")) <= MAX_ID_BYTES:
        return text
    return text.encode(errors="replace")[:MAX_ID_BYTES].decode(errors="ignore") + "…"


def is_binary(kind: pa.DataType) -> bool:
    kinds = (types.is_binary, types.is_large_binary, types.is_fixed_size_binary, types.is_binary_view)
    return any(is_kind(kind) for is_kind in kinds)


def _bounded(column: pa.Array, room: list[int]) -> list[Any]:
    """The values that fit, `LEFT_IN_INPUT` for the others; takes their bytes from each row's room."""
    sizes = _sizes(column)
    fits = [size <= min(MAX_VALUE_BYTES, left) for size, left in zip(sizes, room, strict=True)]
    for row, size in enumerate(sizes):
        room[row] -= size if fits[row] else 0
    kept = (
        values(column)
        if all(fits)
        else [value(column[row]) if fits[row] else LEFT_IN_INPUT for row in range(len(fits))]
    )
    return [None if isinstance(item, BadRow) else item for item in kept]


def _sizes(column: pa.Array) -> list[int]:
    """Bytes of each value, without making a Python object of it."""
    if isinstance(column, pa.ExtensionArray):
        return _sizes(column.storage)
    if isinstance(column, pa.DictionaryArray):
        of = _sizes(column.dictionary)
        return [0 if index is None else of[index] for index in column.indices.to_pylist()]
    if types.is_string_view(column.type):
        column = column.cast(pa.large_string())
    if types.is_string(column.type) or types.is_large_string(column.type):
        return [size or 0 for size in pc.binary_length(column).to_pylist()]
    if types.is_nested(column.type):
        return _nested_sizes(column)
    return [column.type.bit_width // 8 if types.is_primitive(column.type) else 0] * len(column)


def _nested_sizes(column: pa.Array) -> list[int]:
    sizes = [column.slice(row, 1).nbytes for row in range(len(column))]
    if column.nbytes <= MEASURED_BYTES:
        # A dictionary inside counts as a whole for each row.
        sizes = [
            min(size, len(str(value(column[row])))) if size > MAX_VALUE_BYTES else size
            for row, size in enumerate(sizes)
        ]
    return sizes
