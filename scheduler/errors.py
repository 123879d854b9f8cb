"""What the scheduler refuses, by name. Each message says what is wrong, where, and what to do about it."""

from __future__ import annotations

from collections.abc import Collection

from storage.errors import FAILED, USAGE, Changed, NightdraftError, shortened
from storage.suggest import did_you_mean


class SchedulerError(NightdraftError):
    """Base of everything that the scheduler raises on purpose."""

    exit_code = USAGE


class InvalidInput(SchedulerError):
    """The input cannot be read as asked. `problems` has one sentence for each thing that is wrong."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__("\n".join(shortened(problems)))


class InvalidJob(SchedulerError):
    """A job-level value (name, chunk_rows, max_error_rate) is out of range; the message names it."""


class SpecChanged(Changed, SchedulerError):
    """A job of that name exists with another spec."""


class WrongState(SchedulerError):
    """The job is in a state in which the action makes no sense; the message says which and what to do."""


class BrokerUnavailable(SchedulerError):
    """The broker did not take or answer a request. Nothing is lost: SQL knows what has to be sent again."""

    exit_code = FAILED


class BrokerRefused(BrokerUnavailable):
    """The broker does not take this user or password, or there is no such host: a slip in its URL, most likely."""

    exit_code = USAGE


def near_or_all(name: str, known: Collection[str]) -> str:
    """What to put behind "no column 'promt'": the near names, else all of them."""
    shown = ", ".join(shortened(sorted(known)))
    return did_you_mean(name, known, most=3) or (f"; there are: {shown}" if known else "")
