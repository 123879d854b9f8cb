from __future__ import annotations

import json
import math
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from uuid import UUID

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.sql.encoding import dumps, integers, is_faithful, is_storable, storable, to_bytes

TEXT = st.text(st.characters() | st.sampled_from("\x00\ud800\udfff"))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


@given(TEXT)
def test_storable_text_has_utf8_and_no_nul(text: str) -> None:
    clean = storable(text)
    assert "\x00" not in clean
    clean.encode()
    assert len(clean) == len(text)
    assert is_storable(text) == (clean == text)
    assert to_bytes(text).decode().replace("\x00", "�") == clean


@given(JSON)
def test_json_is_what_both_databases_accept(value: object) -> None:
    text = dumps(value)
    text.encode()
    assert "\x00" not in text
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))
    assert all(part == storable(part) for part in _texts(json.loads(text)))
    if is_faithful(value):
        assert json.loads(text) == value


@given(st.dictionaries(st.text("ab\\u0é日"), st.text("ab\\u0é日") | st.integers() | st.booleans() | st.none()))
def test_what_can_be_stored_is_stored_as_it_is(value: dict[str, object]) -> None:
    assert is_faithful(value)
    assert json.loads(dumps(value)) == value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": [1, 2.5, "x"]}, '{"a":[1,2.5,"x"]}'),
        (date(2026, 1, 2), '"2026-01-02"'),
        (datetime(2026, 1, 2, 3, tzinfo=UTC), '"2026-01-02T03:00:00+00:00"'),
        (timedelta(seconds=90), "90.0"),
        (b"\x00\xff", '"AP8="'),
        (Decimal("1.10"), '"1.10"'),
        (UUID(int=1), '"00000000-0000-0000-0000-000000000001"'),
        ([np.int64(3), np.float32(0.5)], "[3,0.5]"),
        ({"a": math.nan, "b": date(2026, 1, 2)}, '{"a":null,"b":"2026-01-02"}'),
        ("\\u0000", '"\\\\u0000"'),
    ],
)
def test_values_that_json_lacks(value: object, text: str) -> None:
    assert dumps(value) == text


def test_what_has_no_json_form_is_named() -> None:
    with pytest.raises(TypeError, match="object has no JSON form"):
        dumps({"a": object()})


def test_integers() -> None:
    assert integers((1, 0, 22)) == "[1,0,22]"
    assert integers(()) == "[]"


def _texts(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        return [text for item in value for text in _texts(item)]
    if isinstance(value, dict):
        return [text for pair in value.items() for item in pair for text in _texts(item)]
    return []
