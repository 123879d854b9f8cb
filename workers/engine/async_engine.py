"""The engine behind an async door: its step loop runs in a thread of its own, requests and completions cross over.

Runs under asyncio and trio (anyio). See docs/engine.md for a runnable example.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Hashable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import anyio
from anyio import from_thread
from anyio.lowlevel import current_token

from workers.engine.api.config import EngineConfig
from workers.engine.api.errors import EngineStopped
from workers.engine.api.request import Completion, Request
from workers.engine.api.stats import EngineSnapshot, StepProfile
from workers.engine.api.tokenizer import TextTokenizer
from workers.engine.core import EngineCore

Deliver = Callable[[Completion | EngineStopped], None]


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: Hashable


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


class Engine:
    """Continuous-batched speculative decoding.

        async with Engine(EngineConfig(target="smollm2-135m")) as engine:
            completion = await engine.generate(Request(id=0, prompt_token_ids=engine.tokenizer.encode("Hello")))

    Entering loads the model (raises `EngineError` when that fails); leaving aborts what is in flight. `make_core` is
    for tests and for callers who load models themselves.
    """

    def __init__(self, config: EngineConfig, *, make_core: Callable[[EngineConfig], EngineCore] = EngineCore) -> None:
        self.config = config
        self._make_core = make_core
        self._inbox: queue.SimpleQueue[Request | _Abort | _Stop] = queue.SimpleQueue()
        self._waiters: dict[Hashable, Deliver] = {}
        self._core: EngineCore | None = None
        self._failure: EngineStopped | None = None
        self._thread: threading.Thread | None = None

    # ---------------------------------------------------------------- life

    async def __aenter__(self) -> Engine:
        self._token = current_token()
        started: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(started,), name="nightdraft-engine", daemon=True)
        self._thread.start()
        with anyio.CancelScope(shield=True):
            error = await anyio.to_thread.run_sync(started.get)
        if error is not None:
            raise error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._inbox.put(_Stop())
        assert self._thread is not None
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._thread.join)
        self._fail(EngineStopped("the engine was closed while the request was in flight"))

    # ------------------------------------------------------------ requests

    async def generate(self, request: Request) -> Completion:
        """Answer one request. A request that cannot run gives a completion with finish_reason ERROR.

        Cancelling the caller aborts the request. Raises `EngineStopped` when the engine dies under it, ValueError when
        the id is in flight already.
        """
        async with aclosing(self.stream((request,))) as completions:
            async for completion in completions:
                return completion
        raise AssertionError("a stream answers every request")

    async def stream(
        self, requests: Iterable[Request] | AsyncIterable[Request], *, ahead: int | None = None
    ) -> AsyncGenerator[Completion, None]:
        """Answer many requests, each as soon as it is finished, in finishing order.

        `requests` is pulled lazily, at most `ahead` (default: twice max_batch) in flight. While a source is waited for,
        finished answers wait too: where requests trickle in, call `generate` for each. Leaving early aborts the rest:
        close the generator (contextlib.aclosing) when you break out of the loop.
        """
        ahead = ahead or 2 * self.config.max_batch
        send, receive = anyio.create_memory_object_stream[Completion | EngineStopped](float("inf"))
        source = _aiter(requests)
        pending: set[Hashable] = set()
        exhausted = False
        try:
            while True:
                while not exhausted and len(pending) < ahead:
                    request = await anext(source, None)
                    if request is None:
                        exhausted = True
                    else:
                        self._submit(request, send.send_nowait)
                        pending.add(request.id)
                if not pending:
                    return
                outcome = await receive.receive()
                if isinstance(outcome, EngineStopped):
                    pending.clear()
                    raise outcome
                pending.discard(outcome.request_id)
                yield outcome
        finally:
            for request_id in pending:
                self._waiters.pop(request_id, None)
                self._inbox.put(_Abort(request_id))
            send.close()
            receive.close()

    async def abort(self, request_id: Hashable) -> None:
        """Stop a request where it is; whoever waits for it gets a completion with finish_reason ABORT."""
        self._inbox.put(_Abort(request_id))
        await anyio.lowlevel.checkpoint()

    def _submit(self, request: Request, deliver: Deliver) -> None:
        if self._failure is not None:
            raise self._failure
        if not isinstance(request, Request):
            raise TypeError(f"the engine answers Requests, got {type(request).__name__}")
        if request.id in self._waiters:
            raise ValueError(f"request id {request.id!r} is in flight already")
        self._waiters[request.id] = deliver
        self._inbox.put(request)

    # ----------------------------------------------------------- reporting

    @property
    def tokenizer(self) -> TextTokenizer:
        return self._started.model.tokenizer

    @property
    def max_model_len(self) -> int:
        return self._started.max_model_len

    @property
    def report(self) -> dict[str, Any]:
        """What runs here: names, content hashes, dtype, attention backend, batch invariance."""
        return self._started.report()

    @property
    def profile(self) -> StepProfile:
        return self._started.profile

    def snapshot(self) -> EngineSnapshot:
        return self._started.snapshot()

    @property
    def _started(self) -> EngineCore:
        if self._core is None:
            raise EngineStopped("the engine is not running: use it inside `async with Engine(...)`")
        return self._core

    # ------------------------------------------------- in the engine's thread

    def _run(self, started: queue.SimpleQueue[BaseException | None]) -> None:
        try:
            core = self._core = self._make_core(self.config)
        except BaseException as error:
            started.put(error)
            return
        started.put(None)
        try:
            while self._take_commands(core):
                self._cross(core.step() if core.has_work else [])
        except Exception as error:
            failure = EngineStopped(f"the engine failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            from_thread.run_sync(self._fail, failure, token=self._token)

    def _take_commands(self, core: EngineCore) -> bool:
        """Handle what has come in; sleep when there is nothing to do. False: stop."""
        rejected: list[Completion] = []
        while not core.has_work or not self._inbox.empty():
            if rejected and self._inbox.empty():
                break
            command = self._inbox.get()
            if isinstance(command, _Stop):
                return False
            done = core.abort(command.request_id) if isinstance(command, _Abort) else core.add(command)
            if done is not None:
                rejected.append(done)
        self._cross(rejected)
        return True

    def _cross(self, completions: list[Completion]) -> None:
        if completions:
            from_thread.run_sync(self._deliver, completions, token=self._token)

    # ----------------------------------------------------- in the event loop

    def _deliver(self, completions: list[Completion]) -> None:
        for completion in completions:
            if deliver := self._waiters.pop(completion.request_id, None):
                deliver(completion)

    def _fail(self, failure: EngineStopped) -> None:
        self._failure = failure
        waiters, self._waiters = self._waiters, {}
        for deliver in waiters.values():
            deliver(failure)


async def _aiter(requests: Iterable[Request] | AsyncIterable[Request]) -> AsyncIterator[Request]:
    if isinstance(requests, AsyncIterable):
        async for request in requests:
            yield request
    else:
        for request in requests:
            yield request
