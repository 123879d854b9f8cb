"""What keeps a training from going on, in words for whoever started it."""

from __future__ import annotations


class TrainingError(Exception):
    """Root of the errors that training raises on purpose."""


class UnusableData(TrainingError):
    """The answers cannot be read, or none of them can be learned from."""


class ChangedRun(TrainingError):
    """What is there to resume belongs to other data, another target or other options."""


class Diverged(TrainingError):
    """The loss is no number any more."""
