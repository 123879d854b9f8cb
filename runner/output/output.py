"""What a command prints on stdout: one JSON value for programs, or text and tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runner.output.console import console, format_value, note, print_json, visible


@dataclass(frozen=True, slots=True)
class Fields:
    """One record: a name and a value per line."""

    values: Mapping[str, Any]
    title: str | None = None

    def print(self) -> None:
        from rich.table import Table as Grid

        grid = Grid(title=self.title, title_justify="left", box=None, show_header=False, title_style="bold")
        grid.add_column(style="dim")
        grid.add_column(overflow="fold")
        for name, value in self.values.items():
            grid.add_row(name, _cell(value))
        console().print(grid, markup=False)


@dataclass(frozen=True, slots=True)
class Table:
    """Rows below the names of their columns; where there are none, the note `empty` on stderr, if one is given."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    title: str | None = None
    empty: str | None = None

    def print(self) -> None:
        if self.empty is not None and not self.rows:
            note(self.empty)
            return
        from rich import box
        from rich.table import Table as Grid

        grid = Grid(title=self.title, title_justify="left", box=box.SIMPLE_HEAD, header_style="bold")
        for index, column in enumerate(self.columns):
            numeric = bool(self.rows) and all(_is_number(row[index]) or row[index] is None for row in self.rows)
            grid.add_column(column, justify="right" if numeric else "left", overflow="fold")
        for row in self.rows:
            grid.add_row(*(_cell(value) for value in row))
        console().print(grid, markup=False)

    def records(self) -> list[dict[str, Any]]:
        """The rows by the names of their columns: what JSON shows of them."""
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


@dataclass(frozen=True, slots=True)
class Passage:
    """A text of the user's under a heading, and an empty line."""

    heading: str
    text: str

    def print(self) -> None:
        out = console()
        out.print(f"[bold]{self.heading}[/]", highlight=False)
        out.print(visible(self.text), markup=False, highlight=False, soft_wrap=True)
        out.print()


@dataclass(frozen=True, slots=True)
class Output:
    """The form of a command's results, chosen once: `--json` or not."""

    as_json: bool

    def show(self, value: Any, *parts: str | Fields | Table | Passage) -> None:
        """Print `value` as JSON, or else the parts that show it to people, one below the other."""
        if self.as_json:
            print_json(value)
            return
        for part in parts:
            if isinstance(part, str):
                print(part)
            else:
                part.print()


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(value: Any) -> Any:
    from rich.text import Text

    return Text(visible(format_value(value)))
