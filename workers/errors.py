"""What can go wrong while a chunk is processed, by name."""

from __future__ import annotations


class BadRow(Exception):
    """A row that cannot become a request. `code` and the message end up in its stored error."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class InvalidSpec(ValueError):
    """The stored job spec cannot be run: the message names the section and the key. Ends the job."""


class UnreadableInput(Exception):
    """An input file is missing, cannot be opened here, or is no longer the file that was submitted. Ends the job."""


class EngineFailed(Exception):
    """The engine broke while it ran (not while it answered one request). The next chunk gets a fresh engine."""


class GaveUp(Exception):
    """The wait for an engine was given up because the chunk no longer needs one."""
