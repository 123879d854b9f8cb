"""Which Arrow types an export writes, and in which form rows of them are picked."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types

_PLAIN = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}


def exported_type(kind: pa.DataType) -> pa.DataType:
    """The type of a column in an export: its own, except that text and binary views inside of a nested type, which no
    Parquet writer of pyarrow takes, are large strings and large binary. Both are the same in Parquet."""
    return kind if kind in _PLAIN else plain_type(kind)


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type without views of text or bytes, at any depth: rows of it can be picked."""
    if kind in _PLAIN:
        return _PLAIN[kind]
    if types.is_struct(kind):
        return pa.struct([_with_plain_type(kind.field(place)) for place in range(kind.num_fields)])
    if types.is_map(kind):
        return pa.map_(plain_type(kind.key_type), _with_plain_type(kind.item_field), keys_sorted=kind.keys_sorted)
    if types.is_fixed_size_list(kind):
        return pa.list_(_with_plain_type(kind.value_field), kind.list_size)
    for is_list, of in _LISTS:
        if is_list(kind):
            return of(_with_plain_type(kind.value_field))
    return kind


_LISTS: tuple[tuple[Any, Any], ...] = (
    (types.is_list, pa.list_),
    (types.is_large_list, pa.large_list),
    (types.is_list_view, pa.list_view),
    (types.is_large_list_view, pa.large_list_view),
)


def _with_plain_type(field: pa.Field) -> pa.Field:
    return field.with_type(plain_type(field.type))


def to_plain(array: pa.Array) -> pa.Array:
    """The values as `plain_type` of their type."""
    kind = plain_type(array.type)
    if kind == array.type:
        return array
    if types.is_list_view(kind) or types.is_large_list_view(kind):
        # pyarrow has no cast between list views.
        return type(array).from_arrays(
            array.offsets, array.sizes, to_plain(array.values), type=kind, mask=array.is_null()
        )
    return array.cast(kind)


def unwritable(schema: pa.Schema) -> Iterator[tuple[str, str]]:
    """The columns that an export could not write, by name, and why: each type is tried on two rows without a value."""
    found: dict[pa.DataType, str] = {}
    for field in schema:
        if field.type not in found:
            found[field.type] = _why_unwritable(field.type)
        if found[field.type]:
            yield field.name, found[field.type]


def _why_unwritable(kind: pa.DataType) -> str:
    try:
        _require_casts(kind)
        rows = to_plain(pa.nulls(2, kind)).take(pa.array([1, 0])).cast(exported_type(kind))
        pq.write_table(pa.table([rows], names=["x"]), io.BytesIO())
    except (pa.ArrowException, TypeError) as error:
        return str(error)
    return ""


def _require_casts(kind: pa.DataType) -> None:
    """Raise `ArrowNotImplementedError` for a list view of views inside of another nested type: pyarrow cannot cast it,
    and ends the process over some of those that it tries."""
    outer = kind
    if types.is_list_view(outer) or types.is_large_list_view(outer):
        outer = outer.value_type
    if outer != plain_type(outer) and _has_list_view(outer):
        raise pa.ArrowNotImplementedError(f"views inside of list views inside of {kind}")


def _has_list_view(kind: pa.DataType) -> bool:
    if types.is_list_view(kind) or types.is_large_list_view(kind):
        return True
    return any(_has_list_view(kind.field(place).type) for place in range(kind.num_fields))
