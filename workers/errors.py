"""What can go wrong while a chunk is processed, by name."""

from __future__ import annotations

from workers.engine.api.errors import EngineError

LOAD_FAILED = "load_failed"
"""Error code of a job whose engine cannot be loaded, for a reason that the engine has no name for."""


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
    """The engine broke while it ran (not while it answered one request). The next chunk gets a fresh engine.

    `code` is what broke it, by the name that a stored error has.
    """

    def __init__(self, message: str, code: str = EngineError.code) -> None:
        super().__init__(message)
        self.code = code


class LoadFailed(Exception):
    """The engine could not be loaded, for a reason that may be this machine's own: memory, a device, a broken file."""


class GaveUp(Exception):
    """A wait, for an engine or for a place in the process, was given up because the chunk no longer needs it."""
