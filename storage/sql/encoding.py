"""What reaches the database as text and JSON, and what never does.

A SQL text holds neither U+0000 (PostgreSQL refuses it) nor lone surrogates (they have no UTF-8). A model can emit the
first, so no such character may cost a row its record. One rule on both databases: U+FFFD takes its place in every text
and JSON value of a result. Where that changes the output text, its UTF-8 is kept besides, in results.output_bytes, so
reading and export give back the NUL characters exactly; a lone surrogate stays U+FFFD.
JSON holds no NaN or infinity: they become null.
"""

from __future__ import annotations

import base64
import json
import math
import re
from datetime import date, time, timedelta
from decimal import Decimal
from functools import lru_cache
from typing import Any
from uuid import UUID

_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


def storable(text: str) -> str:
    """The text as the store keeps it: U+FFFD for every NUL character and lone surrogate."""
    return text if is_storable(text) else _UNSTORABLE.sub("�", text)


def is_storable(text: str) -> bool:
    """Whether both databases can hold the text as it is."""
    if "\x00" in text:
        return False
    return text.isascii() or _UNSTORABLE.search(text) is None


def to_bytes(text: str) -> bytes:
    """UTF-8 of any Python string, NUL characters kept, lone surrogates replaced by U+FFFD."""
    return re.sub("[\ud800-\udfff]", "�", text).encode()


def is_faithful(value: Any) -> bool:
    """Whether a JSON value is stored exactly as it is."""
    try:
        text = _STRICT.encode(value)
    except ValueError:
        return False
    return dumps(value) == text


def dumps(value: Any) -> str:
    """JSON text that both databases accept, without spaces; dates as ISO text, bytes as base64, Decimal as text."""
    try:
        text = _STRICT.encode(value)
    except ValueError:
        return _STRICT.encode(_clean(value))
    if "\\u0000" in text or not is_storable(text):
        return _STRICT.encode(_clean(value))
    return text


@lru_cache(maxsize=8192)
def integers(values: tuple[int, ...]) -> str:
    """JSON array of integers; the same few histograms come again and again."""
    return "[" + ",".join(map(str, values)) + "]"


def _from_object(value: Any) -> Any:
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode()
    if isinstance(value, Decimal | UUID):
        return str(value)
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} has no JSON form; carried columns hold JSON values")


def _clean(value: Any) -> Any:
    """The same value with unstorable characters replaced and NaN and infinities as null."""
    if isinstance(value, str):
        return storable(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {storable(str(key)): _clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    if value is None or isinstance(value, int):
        return value
    return _clean(_from_object(value))


_STRICT = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_from_object)
