"""What keeps a training from going on, in words for whoever started it."""

from __future__ import annotations

from workers.engine.api.errors import EngineError


class TrainingError(EngineError):
    """Root of the errors that training raises on purpose."""

    code = "training"


class UnusableData(TrainingError):
    """The answers cannot be read, or none of them can be learned from."""

    exit_code = 2


class ChangedRun(TrainingError):
    """What is there to resume belongs to other data, another target or other options."""

    exit_code = 2


class Diverged(TrainingError):
    """The loss is no number any more."""
