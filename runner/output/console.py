"""The two streams, and how a value is written on them. Results go to stdout, everything else to stderr."""

from __future__ import annotations

import json
import sys
import unicodedata
from datetime import date, datetime
from typing import TYPE_CHECKING, Any

from storage.redaction import redacted

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 500
"""Columns given to a table that no terminal shows: wide enough that nothing is cut."""


def console() -> Console:
    """Console on stdout. Built per call, so that a redirected stdout is honoured."""
    from rich.console import Console

    return Console(file=sys.stdout, width=None if sys.stdout.isatty() else PIPE_WIDTH)


def error_console() -> Console:
    """Console on stderr, for progress, notes and errors."""
    from rich.console import Console

    return Console(file=sys.stderr, width=None if sys.stderr.isatty() else PIPE_WIDTH)


def note(text: str) -> None:
    """A line for the reader, on stderr, so that stdout stays clean for programs. Secrets of URLs in it are hidden."""
    error_console().print(visible(redacted(text)), highlight=False, soft_wrap=True, markup=False)


def print_json(value: Any) -> None:
    """One JSON value on stdout."""
    print(json.dumps(value, indent=2, ensure_ascii=False, default=json_default))


def print_json_line(value: Any) -> None:
    """One JSON value on one line of stdout, flushed: for streams of updates."""
    print(json.dumps(value, ensure_ascii=False, default=json_default), flush=True)


def visible(text: str) -> str:
    """The text with everything that would move, colour or reorder a terminal's text escaped; lines and tabs stay."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escaped(letter) if _is_control(letter) else letter for letter in text)


def _is_control(letter: str) -> bool:
    # Cc: controls, Cf: formats such as U+202E, Cs: lone surrogates, Zl and Zp: line separators of Unicode. Joiners are
    # part of emoji and of several scripts.
    return letter not in "\n\t\u200c\u200d" and unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Zl", "Zp")


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape").decode()


def format_value(value: Any) -> str:
    """A value as a table shows it: nothing for NULL, seconds-precise local times, three digits for fractions."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 1000 else f"{value:,.0f}"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, datetime):
        return f"{value.astimezone():%Y-%m-%d %H:%M:%S}"
    if isinstance(value, dict | list | tuple):
        return json.dumps(value, ensure_ascii=False, default=json_default)
    return str(value)


def counted(count: int, noun: str) -> str:
    """ "1 row", "2 rows"."""
    return f"{format_value(count)} {noun}" + ("" if count == 1 else "s")


def format_bytes(count: int) -> str:
    """A size in the largest unit that leaves a whole part."""
    value, units = float(count), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} bytes" if units[0] == "bytes" else f"{value:.1f} {units[0]}"


def json_default(value: Any) -> Any:
    """What JSON has no form for: times as ISO text, bytes as hex, anything else as its text."""
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, bytes | memoryview):
        return bytes(value).hex()
    return str(value)
