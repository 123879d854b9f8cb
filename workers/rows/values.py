"""From Arrow to Python values, one at a time where a whole column has none."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from workers.errors import BadRow

_LISTS = (pa.ListScalar, pa.LargeListScalar, pa.FixedSizeListScalar, pa.ListViewScalar, pa.LargeListViewScalar)


def values(column: pa.Array) -> list[Any]:
    """Python values; a value that cannot be decoded becomes the `BadRow` that says so, and the others stay."""
    try:
        found: list[Any] = column.to_pylist()
        return found
    except (ValueError, pa.ArrowException):
        return [value(scalar) for scalar in column]


def value(scalar: pa.Scalar) -> Any:
    """The Python value; text where Python's own type is too coarse (nanoseconds), or a `BadRow`."""
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        return BadRow("invalid_text", f"the text is not valid UTF-8: {error}")
    except (ValueError, pa.ArrowException):
        if isinstance(scalar, pa.StructScalar):
            return {name: value(scalar[name]) for name in scalar}
        if isinstance(scalar, _LISTS):
            return [value(item) for item in scalar.values]
        return str(scalar.cast(pa.string()))
