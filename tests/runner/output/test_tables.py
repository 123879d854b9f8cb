from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from runner.output.console import format_value, note, print_fields, print_json_line, print_rows

NOW = datetime(2025, 1, 2, 3, 4, 5, tzinfo=UTC)


def test_json_rows_keep_values(capsys: pytest.CaptureFixture[str]) -> None:
    print_rows(("a", "b", "c"), [(1, None, NOW), (2, "x[red]y", b"\x01")], as_json=True)
    assert json.loads(capsys.readouterr().out) == [
        {"a": 1, "b": None, "c": NOW.isoformat()},
        {"a": 2, "b": "x[red]y", "c": "01"},
    ]


def test_a_table_shows_text_as_it_is_and_null_as_a_dash(capsys: pytest.CaptureFixture[str]) -> None:
    print_rows(("name", "rate"), [("[bold]x[/]", None), ("w" * 300, 0.25)], title="t")
    out = capsys.readouterr().out
    assert "[bold]x[/]" in out
    assert "w" * 300 in out
    assert "0.250" in out
    assert "-" in out


def test_fields_as_table_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    print_fields({"state": "queued", "rows": 12345})
    assert "12,345" in capsys.readouterr().out
    print_fields({"state": "queued", "rows": 12345}, as_json=True)
    assert json.loads(capsys.readouterr().out) == {"state": "queued", "rows": 12345}


def test_notes_stay_off_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    note("look at [this]")
    print_json_line({"a": 1})
    captured = capsys.readouterr()
    assert captured.err == "look at [this]\n"
    assert captured.out == '{"a": 1}\n'


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (True, "yes"), (0.12345, "0.123"), (1234.5, "1,234"), (999, "999"), (12345, "12,345"), ([1], "[1]")],
)
def test_values(value: object, text: str) -> None:
    assert format_value(value) == text
