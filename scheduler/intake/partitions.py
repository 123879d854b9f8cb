"""The columns that folders named key=value give to the rows below them, typed alike over all files of a job."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_INTEGER = re.compile(r"0|-?[1-9]\d{0,17}")
"""As integers are written: 007 is text."""


def typed_partitions(
    folders: Sequence[Mapping[str, str | None]], taken: Sequence[str]
) -> list[dict[str, int | str | None]]:
    """For each file the values of every key that any has, None where it has none; without the keys that are `taken`.

    A key whose values are all integers is one of integers.
    """
    keys = [key for key in dict.fromkeys(key for values in folders for key in values) if key not in taken]
    integers = {key for key in keys if all(_INTEGER.fullmatch(values.get(key) or "0") for values in folders)}
    return [{key: _typed(values.get(key), key in integers) for key in keys} for values in folders]


def _typed(value: str | None, is_integer: bool) -> int | str | None:
    return int(value) if is_integer and value is not None else value
