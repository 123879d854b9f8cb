from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from runner.output.console import format_value, note, print_json_line
from runner.output.output import Fields, Output, Passage, Table

NOW = datetime(2025, 1, 2, 3, 4, 5, tzinfo=UTC)


def test_json_rows_keep_values(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(("a", "b", "c"), [(1, None, NOW), (2, "x[red]y", b"\x01")])
    Output(as_json=True).show(table.records(), table)
    assert json.loads(capsys.readouterr().out) == [
        {"a": 1, "b": None, "c": NOW.isoformat()},
        {"a": 2, "b": "x[red]y", "c": "01"},
    ]


def test_a_table_shows_text_as_it_is_and_null_as_a_dash(capsys: pytest.CaptureFixture[str]) -> None:
    Table(("name", "rate"), [("[bold]x[/]", None), ("w" * 300, 0.25)], title="t").print()
    out = capsys.readouterr().out
    assert "[bold]x[/]" in out
    assert "w" * 300 in out
    assert "0.250" in out
    assert "-" in out


def test_fields_as_table_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    values = {"state": "queued", "rows": 12345}
    Output(as_json=False).show(values, Fields(values))
    assert "12,345" in capsys.readouterr().out
    Output(as_json=True).show(values, Fields(values))
    assert json.loads(capsys.readouterr().out) == {"state": "queued", "rows": 12345}


def test_parts_follow_each_other_and_an_empty_table_is_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    parts = (Passage("row 1", "[x]\x1b"), "done", Table(("a",), [], empty="no rows"))
    Output(as_json=False).show([], *parts)
    captured = capsys.readouterr()
    assert captured.out == "row 1\n[x]\\x1b\n\ndone\n"
    assert captured.err == "no rows\n"
    Output(as_json=True).show([], *parts)
    assert capsys.readouterr().out == "[]\n"


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
