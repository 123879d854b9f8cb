"""What a worker asks of an engine, and the engines that it can have."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from importlib import import_module
from typing import Any, Protocol

from workers.engine.api.backends import ENGINES
from workers.engine.api.config import EngineConfig
from workers.engine.api.errors import RemoteCodeRefused
from workers.engine.api.request import Completion, Request
from workers.engine.api.stats import EngineSnapshot
from workers.engine.api.tokenizer import TextTokenizer


class HostedEngine(Protocol):
    """An engine as a host uses it, with its model loaded. Made by one of `ENGINES`; fakes in tests implement it too."""

    @property
    def tokenizer(self) -> TextTokenizer:
        """Of the target."""
        ...

    @property
    def max_model_len(self) -> int:
        """Tokens that a sequence may have, its prompt included."""
        ...

    @property
    def report(self) -> dict[str, Any]:
        """What runs, for the job's record: JSON values; content_hash, speculator and draft among them."""
        ...

    def stream(self, requests: Iterable[Request], *, ahead: int | None = None) -> AsyncGenerator[Completion, None]:
        """Completions as requests finish, at most `ahead` of them in flight. Closing it aborts the rest."""
        ...

    def snapshot(self) -> EngineSnapshot:
        """Load now, and totals so far."""
        ...


EngineFactory = Callable[[EngineConfig], AbstractAsyncContextManager[HostedEngine]]


def real_engine(config: EngineConfig) -> AbstractAsyncContextManager[HostedEngine]:
    """The engine that the configuration names. Imported on first use, so that a process without work stays small."""
    module, _, name = ENGINES[config.backend].partition(":")
    engine: AbstractAsyncContextManager[HostedEngine] = getattr(import_module(module), name)(config)
    return engine


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
