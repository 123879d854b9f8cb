"""Which exit code an error ends with."""

from __future__ import annotations

from runner.errors import ExitCode, RunnerError
from scheduler.errors import BrokerRefused, BrokerUnavailable, SchedulerError
from storage.errors import (
    ChunkIncomplete,
    InvalidPlan,
    LeaseLost,
    OutputFailed,
    StorageError,
    StoreFailed,
    StoreUnavailable,
)
from storage.wire import UnsupportedBroker
from workers.engine.api.errors import EngineError, InvalidConfig, ModelNotFound, UnsupportedModel
from workers.errors import EngineFailed, InvalidSpec, LoadFailed, UnreadableInput

_USAGE = (
    SchedulerError,
    StorageError,
    UnsupportedBroker,
    InvalidSpec,
    LoadFailed,
    UnreadableInput,
)
_FAILED = (
    BrokerUnavailable,
    StoreUnavailable,
    StoreFailed,
    OutputFailed,
    LeaseLost,
    ChunkIncomplete,
    InvalidPlan,
    EngineError,
    EngineFailed,
)


def exit_code(error: BaseException) -> ExitCode | None:
    """Exit code of an error that a package raises on purpose; None for one that nobody expected."""
    if isinstance(error, RunnerError):
        return error.exit_code
    if isinstance(error, (InvalidConfig, ModelNotFound, UnsupportedModel, BrokerRefused)):
        return ExitCode.USAGE
    if isinstance(error, _FAILED):
        return ExitCode.FAILED
    return ExitCode.USAGE if isinstance(error, _USAGE) else None
