"""The engine in its own thread, and the bridge that task threads use to feed it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, aclosing, suppress

from anyio.from_thread import BlockingPortal, start_blocking_portal

from workers.engine.api.config import EngineConfig
from workers.engine.api.errors import EngineError, EngineStopped
from workers.engine.api.request import Completion, Request
from workers.engine.api.stats import EngineSnapshot
from workers.engine.api.tokenizer import TextTokenizer
from workers.errors import EngineFailed
from workers.hosting.interface import EngineFactory, HostedEngine, real_engine

_CLOSE_SECONDS = 5.0
"""How long `Session.close` waits for the engine to let go of what it aborts; a step may be running."""


class EngineHost:
    """One engine on an event loop of its own, for any number of threads. `start` loads it, `stop` frees it."""

    def __init__(self, config: EngineConfig, *, factory: EngineFactory = real_engine) -> None:
        self.config = config
        self.failed = False
        """Set by the first session that the engine breaks under: nobody should start another on it."""
        self.job_id: str | None = None
        """The job that it worked for last."""
        self.reading = threading.RLock()
        """Held while the counters are read and recorded, so that no reading is dated before an older one."""
        self.ready_at: float | None = None
        """When the model was loaded, by the monotonic clock."""
        self._factory = factory
        self._stack = ExitStack()
        self._portal: BlockingPortal | None = None
        self._engine: HostedEngine | None = None

    def start(self) -> None:
        """Start the thread and load the model; returns when it is ready. Raises what loading raises."""
        with ExitStack() as stack:
            portal = stack.enter_context(start_blocking_portal(name="engine"))
            engine = stack.enter_context(portal.wrap_async_context_manager(self._factory(self.config)))
            self._portal, self._engine = portal, engine
            self.ready_at = time.monotonic()
            self._stack = stack.pop_all()

    def stop(self) -> None:
        """Abort what runs, free the model, end the thread."""
        self._engine = None
        self._stack.close()

    @property
    def engine(self) -> HostedEngine:
        if self._engine is None:
            raise EngineFailed("the engine is not running")
        return self._engine

    @property
    def portal(self) -> BlockingPortal:
        if self._portal is None:
            raise EngineFailed("the engine is not running")
        return self._portal

    @property
    def tokenizer(self) -> TextTokenizer:
        return self.engine.tokenizer

    @property
    def max_model_len(self) -> int:
        return self.engine.max_model_len

    @property
    def ahead(self) -> int:
        """Requests that one session keeps in flight, so that the running batch refills from its queue at once."""
        return 2 * self.config.max_batch

    def snapshot(self) -> EngineSnapshot:
        """The engine's counters now. Raises `EngineFailed` when it has ended."""
        try:
            return self.portal.call(self.engine.snapshot)
        except RuntimeError as error:
            raise EngineFailed(f"the engine's thread has ended: {error}") from error

    def session(self) -> Session:
        """A stream of requests in and completions out, for one thread."""
        return Session(self, self.ahead)


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"


def _code(error: Exception) -> str:
    """Of the error that stopped the engine, if it is one of the engine's own."""
    cause = error.__cause__ if isinstance(error, EngineStopped) else error
    return cause.code if isinstance(cause, EngineError) else EngineError.code


class Session:
    """Carries requests of one thread into the engine's loop and completions back. Not for sharing between threads."""

    def __init__(self, host: EngineHost, ahead: int) -> None:
        self.in_flight = 0
        """Requests sent whose completions were not received."""
        self._host = host
        self._ahead = ahead
        self._streams: set[Future[None]] = set()
        self._outbox: queue.SimpleQueue[Completion | Exception] = queue.SimpleQueue()

    @property
    def room(self) -> int:
        """Requests that may be sent before the bound on requests in flight is reached."""
        return self._ahead - self.in_flight

    @property
    def refill(self) -> int:
        """Room worth a trip into the engine's thread: far fewer trips than requests, long before the queue runs dry."""
        return max(1, self._ahead // 4)

    def send(self, requests: Sequence[Request]) -> None:
        """Hand requests to the engine, all of them at once. Raises `EngineFailed` when it is gone."""
        try:
            stream = self._host.portal.start_task_soon(self._carry, requests)
        except RuntimeError as error:
            self._host.failed = True
            raise EngineFailed(f"the engine's thread has ended: {error}") from error
        self._streams = {stream, *(stream for stream in self._streams if not stream.done())}
        self.in_flight += len(requests)

    def receive(self, timeout: float | None = None) -> list[Completion]:
        """What has finished: waits for the first completion, at most `timeout` seconds.

        Raises `EngineFailed` after everything that was answered before the failure has been received.
        """
        received: list[Completion] = []
        try:
            item = self._outbox.get(timeout=timeout)
            while True:
                if isinstance(item, Exception):
                    if received:  # those first
                        self._outbox.put(item)
                        return received
                    self._host.failed = True
                    raise EngineFailed(_told(item), _code(item)) from item
                self.in_flight -= 1
                received.append(item)
                item = self._outbox.get_nowait()
        except queue.Empty:
            return received

    def close(self) -> list[Completion]:
        """Abort what is still in flight; returns the completions that had not been received."""
        for stream in self._streams:
            stream.cancel()
        wait(self._streams, timeout=_CLOSE_SECONDS)
        rest: list[Completion] = []
        with suppress(queue.Empty):
            while True:
                item = self._outbox.get_nowait()
                if isinstance(item, Completion):
                    rest.append(item)
        return rest

    async def _carry(self, requests: Sequence[Request]) -> None:
        """In the engine's loop: pass completions on. Being cancelled closes the stream, which aborts the rest."""
        try:
            async with aclosing(self._host.engine.stream(requests, ahead=len(requests))) as completions:
                async for completion in completions:
                    self._outbox.put(completion)
        except Exception as error:
            self._outbox.put(error)
