"""What can go wrong in the store, by name. Every message says what was wrong, where, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FAILED, USAGE = 1, 2
"""Exit codes of a command: something failed that may work another time; the input or the command must change."""

MAX_SHOWN = 10
"""Lines of a list that a message shows."""


def shortened(lines: Sequence[str]) -> list[str]:
    """At most `MAX_SHOWN` lines, and how many more there are."""
    if len(lines) <= MAX_SHOWN:
        return list(lines)
    return [*lines[:MAX_SHOWN], f"  ... and {len(lines) - MAX_SHOWN} more"]


class NightdraftError(Exception):
    """Base of every error that a package raises on purpose: its message is one line for the user."""

    exit_code = FAILED
    """What a command ends with that meets it."""


class StorageError(NightdraftError):
    """Base of every error that the store raises on purpose."""

    exit_code = USAGE


class StoreUnavailable(StorageError):
    """The database cannot be reached, or this machine cannot use it."""

    exit_code = FAILED


class StoreFull(StoreUnavailable):
    """No space is left where the database lives. Nothing is lost; it goes on once somebody has made room."""


class StoreFailed(StorageError):
    """The database refuses a statement, and would again: no permission, a damaged file, a table that is missing."""

    exit_code = FAILED


class InvalidStore(StorageError):
    """The store's URL is wrong (host, database, user, password, options), or the file that it names is no database."""


class NoStore(InvalidStore):
    """Nothing is there yet: no file, or a database without a table."""


class SchemaOutdated(StorageError):
    """The database's schema revision is not the one that this version needs."""


class UnknownJob(StorageError):
    """No job, or more than one, answers to that id, name or prefix."""


class JobExists(StorageError):
    """A job of that name is already in the store."""


class InvalidPlan(StorageError):
    """The chunks of a new job do not cover its rows exactly once, in order."""

    exit_code = FAILED


class UnstorableText(StorageError):
    """A job's name or spec has characters that a database cannot hold."""


class RefusedSpec(StorageError):
    """A job spec has a value, a key or a shape that no job can have. `problems` has one sentence for each."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__("; ".join(problems))


class JobNotFinished(StorageError):
    """The job has to be finished (or stopped) for this, and is not."""


class JobStopped(StorageError):
    """The job's state does not allow this."""


class LeaseLost(StorageError):
    """The chunk's epoch moved on: another worker has it, or it was reaped or cancelled. Nothing was written."""

    exit_code = FAILED


class InvalidResult(StorageError):
    """A result contradicts itself: statistics that do not add up, or an error without a code."""


class ChunkIncomplete(StorageError):
    """A chunk cannot be finished: some (row, sample) of it has no record yet."""

    exit_code = FAILED


@dataclass(frozen=True, slots=True)
class Difference:
    """One field that is not what it was."""

    field: str
    was: str
    now: str

    def __str__(self) -> str:
        return f"{self.field}: {self.was} -> {self.now}"


class Changed(StorageError):
    """Something differs from what a job was submitted with; `differences` lists the fields, a line each."""

    def __init__(self, headline: str, differences: Sequence[Difference] = (), advice: str = "") -> None:
        self.headline, self.differences, self.advice = headline, tuple(differences), advice
        lines = shortened([f"  {difference}" for difference in differences])
        super().__init__("\n".join(filter(None, (headline, *lines, advice))))

    @property
    def line(self) -> str:
        """What changed in one line, without advice: for records, and among other lines."""
        return " ".join((self.headline, "; ".join(map(str, self.differences)))).strip()


class InputChanged(Changed):
    """The input files are not what they were when the job was submitted."""


class UnusableOutput(StorageError):
    """The export cannot be written to that path."""


class OutputFailed(StorageError):
    """Writing a file failed half way: no space is left, or the disk fails. Nothing of it stays."""

    exit_code = FAILED


class InvalidQuery(StorageError):
    """The SQL of the user was refused: not read-only, or the database reported an error."""


class InputNotFound(StorageError):
    """No file, directory or match under that input path."""


class NotParquet(StorageError):
    """A file is not readable Parquet: another format, or cut off."""
