from __future__ import annotations

import pytest

from workers.engine.detokenizer import StopScanner
from workers.engine.tokenizer import ByteTokenizer


@pytest.mark.parametrize(
    ("text", "stop", "cut"),
    [
        ("one two three", ("two",), 4),
        ("one two three", ("three", "tw"), 4),
        ("aXYb", ("XY",), 1),
        ("naïve café", ("é",), 9),
        ("日本語。終", ("。",), 3),
        ("nothing here", ("stop",), None),
        ("abab", ("ba",), 1),
    ],
)
def test_a_stop_string_is_found_at_its_last_token(text: str, stop: tuple[str, ...], cut: int | None) -> None:
    scanner = StopScanner(ByteTokenizer(), stop)
    cuts = [scanner.push(token) for token in text.encode()]
    found = [c for c in cuts if c is not None]
    assert (found[0] if found else None) == cut
    if cut is not None:
        first = next(i for i, c in enumerate(cuts) if c is not None)
        so_far = text.encode()[: first + 1].decode()
        assert any(so_far.endswith(s) for s in stop)
