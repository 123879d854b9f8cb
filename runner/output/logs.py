"""What the packages log while a job runs in this process: a line each, tracebacks on request."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from runner.output.console import note

OWN = ("runner", "scheduler", "workers", "storage")


class _NoteHandler(logging.Handler):
    """Prints to stderr above the live display."""

    def emit(self, record: logging.LogRecord) -> None:
        note(self.format(record))


class _OneLine(logging.Formatter):
    """Leaves the traceback out: the message names the error, and `--verbose` shows the rest."""

    def format(self, record: logging.LogRecord) -> str:
        record.message = record.getMessage()
        if record.exc_info and record.exc_info[1]:
            record.message += f": {record.exc_info[1]}"
        return self.formatMessage(record)


def _worth_showing(record: logging.LogRecord) -> bool:
    """Other people's warnings (a library that misses an optional part) say nothing about the job."""
    return record.levelno >= logging.ERROR or record.name.partition(".")[0] in OWN


@contextmanager
def logging_to_stderr(*, verbose: bool) -> Iterator[None]:
    """Show warnings and errors, or everything with tracebacks, while the block runs."""
    handler = _NoteHandler()
    handler.setFormatter(
        logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
        if verbose
        else _OneLine("%(levelname)s: %(message)s")
    )
    if not verbose:
        handler.addFilter(_worth_showing)
    handler.setLevel(logging.INFO if verbose else logging.WARNING)
    root = logging.getLogger()
    before = root.level
    root.addHandler(handler)
    root.setLevel(handler.level)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(before)
