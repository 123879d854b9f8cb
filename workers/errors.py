"""What can go wrong while a chunk is processed, by name."""

from __future__ import annotations

from storage.errors import USAGE, NightdraftError
from workers.engine.api.errors import EngineError


class BadRow(Exception):
    """A row that cannot become a request. `code` and the message end up in its stored error."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class InvalidSpec(NightdraftError, ValueError):
    """The stored job spec cannot be run: the message names the section and the key. Ends the job."""

    code = "invalid_spec"
    exit_code = USAGE


class UnreadableInput(NightdraftError):
    """An input file is missing, cannot be opened here, or is no longer the file that was submitted. Ends the job."""

    exit_code = USAGE


class EngineFailed(NightdraftError):
    """The engine broke while it ran (not while it answered one request). The next chunk gets a fresh engine.

    `code` is what broke it, by the name that a stored error has.
    """

    def __init__(self, message: str, code: str = EngineError.code) -> None:
        super().__init__(message)
        self.code = code


class LoadFailed(NightdraftError):
    """The engine could not be loaded, for a reason that may be this machine's own: memory, a device, a broken file."""

    code = "load_failed"
    exit_code = USAGE


class GaveUp(Exception):
    """A wait, for an engine or for a place in the process, was given up because the chunk no longer needs it."""
