"""What can go wrong between a command line and a job, and the exit code that each error ends with."""

from __future__ import annotations

from enum import IntEnum

from storage.errors import FAILED, USAGE, NightdraftError
from workers.engine.api.errors import EngineError


class ExitCode(IntEnum):
    OK = 0
    FAILED = FAILED
    USAGE = USAGE
    """Bad usage or configuration: nothing was generated, the input or the command must change."""
    FAILED_ROWS = 3
    """The job completed, and some of its rows hold an error."""
    INTERRUPTED = 130


class RunnerError(NightdraftError):
    """Base of the runner's own errors. The message names what to do."""


class UsageError(RunnerError):
    """An option, a key of a job file or a name is wrong."""

    exit_code = ExitCode.USAGE


class SpecError(UsageError):
    """A job spec has unknown keys, or values that no job takes. `problems` names each with its section; the message has
    a line for each."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        lines = problems if len(problems) == 1 else (f"{len(problems)} things are wrong in the job spec:", *problems)
        super().__init__("\n  ".join(lines))


def exit_code(error: BaseException) -> ExitCode | None:
    """Exit code of an error that a package raises on purpose; None for one that nobody expected."""
    return ExitCode(error.exit_code) if isinstance(error, (NightdraftError, EngineError)) else None
