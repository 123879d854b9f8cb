"""What a worker asks of an engine, and the engines that it can have."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from workers.engine.api.config import EngineConfig
from workers.engine.api.errors import RemoteCodeRefused
from workers.engine.api.request import Completion, Request
from workers.engine.api.stats import EngineSnapshot
from workers.engine.text.tokenizer import TextTokenizer


class HostedEngine(Protocol):
    """The part of `workers.engine.Engine` that a host uses; fakes in tests implement it too."""

    @property
    def tokenizer(self) -> TextTokenizer: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def report(self) -> dict[str, Any]: ...
    def stream(self, requests: Iterable[Request], *, ahead: int | None = None) -> AsyncGenerator[Completion, None]: ...
    def snapshot(self) -> EngineSnapshot: ...


EngineFactory = Callable[[EngineConfig], AbstractAsyncContextManager[HostedEngine]]


def real_engine(config: EngineConfig) -> AbstractAsyncContextManager[HostedEngine]:
    """The engine itself. Imports torch on first use, so that a process without work stays small."""
    from workers.engine import Engine

    return Engine(config)


def without_remote_code(factory: EngineFactory) -> EngineFactory:
    """A factory that makes the same engines, except that none runs code which comes with a model.

    For machines whose owner is not the submitter. The new factory raises `RemoteCodeRefused`.
    """

    def make(config: EngineConfig) -> AbstractAsyncContextManager[HostedEngine]:
        if config.trust_remote_code:
            raise RemoteCodeRefused(
                f"the job asks to run code that comes with {config.target} or its draft (engine.trust_remote_code), "
                "which this worker does not allow: start workers with --allow-remote-code and resume the job, or "
                "submit it without engine.trust_remote_code"
            )
        return factory(config)

    return make
