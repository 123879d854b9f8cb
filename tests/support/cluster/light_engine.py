"""An engine without a model for the system tests: starts at once, answers with a hash, sleeps and dies on request."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from hashlib import blake2b
from typing import Any

import anyio

from workers.engine.api.config import EngineConfig
from workers.engine.api.request import Completion, FinishReason, Request, Timings
from workers.engine.api.stats import AcceptanceStats, EngineSnapshot
from workers.engine.text.tokenizer import ByteTokenizer
from workers.hosting.interface import HostedEngine, real_engine


class LightEngine:
    """`target` is "light:MILLISECONDS[:POISON]": how long an answer takes, and the text that kills the process."""

    max_model_len = 4096

    def __init__(self, config: EngineConfig) -> None:
        _, delay, *poison = config.target.split(":")
        self.tokenizer = ByteTokenizer()
        self.report: dict[str, Any] = {
            "name": config.target,
            "content_hash": "light",
            "speculator": {"verify": "exact"},
        }
        self._seconds = float(delay) / 1000
        self._poison = poison[0] if poison else None
        self._room = anyio.CapacityLimiter(config.max_batch)

    def snapshot(self) -> EngineSnapshot:
        return EngineSnapshot(running=int(self._room.borrowed_tokens))

    async def stream(
        self, requests: Iterable[Request], *, ahead: int | None = None
    ) -> AsyncGenerator[Completion, None]:
        send, receive = anyio.create_memory_object_stream[Completion](1000)
        async with anyio.create_task_group() as group, receive, send:
            waiting = list(requests)
            for request in waiting:
                group.start_soon(self._answer, request, send)
            for _ in waiting:
                yield await receive.receive()
            group.cancel_scope.cancel()

    async def _answer(self, request: Request, send: Any) -> None:
        async with self._limit(request):
            if self._poison and self._poison in self.tokenizer.decode(request.prompt_token_ids):
                os._exit(139)
            await anyio.sleep(self._seconds)
        await send.send(completion_of(request))

    @asynccontextmanager
    async def _limit(self, request: Request) -> AsyncGenerator[None, None]:
        await self._room.acquire_on_behalf_of(request.id)
        try:
            yield
        finally:
            self._room.release_on_behalf_of(request.id)


@asynccontextmanager
async def light_engine(config: EngineConfig) -> AsyncGenerator[LightEngine, None]:
    yield LightEngine(config)


def engine_for(config: EngineConfig) -> AbstractAsyncContextManager[HostedEngine]:
    """The light engine for targets that begin with "light:", the real one for the others."""
    return light_engine(config) if config.target.startswith("light:") else real_engine(config)


def completion_of(request: Request) -> Completion:
    """Depends on the prompt, the parameters and the sample alone, as every engine's answer does."""
    text = blake2b(repr((request.prompt_token_ids, request.params, request.sample)).encode(), digest_size=8).hexdigest()
    stats = AcceptanceStats()
    for _ in text:
        stats.count_step(drafted=0, accepted=0, trimmed=0, reached=0)
    return Completion(
        request_id=request.id,
        sample=request.sample,
        token_ids=tuple(text.encode()),
        text=text,
        finish_reason=FinishReason.EOS,
        num_prompt_tokens=len(request.prompt_token_ids),
        stats=stats,
        timings=Timings(),
        method="none",
    )
