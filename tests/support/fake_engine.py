"""A fake engine behind the host's factory, and small builders of jobs and inputs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio

from workers.engine.api.config import EngineConfig
from workers.engine.api.request import Completion, FinishReason, Request, Timings
from workers.engine.api.stats import AcceptanceStats, EngineSnapshot
from workers.engine.text.tokenizer import ByteTokenizer


@dataclass
class Script:
    """What the fake engines of a test do, and what happened to them."""

    hold: str = "HOLD"
    """A prompt with this text is answered only when its stream is closed: never."""
    fail: str = "FAIL"
    """A prompt with this text breaks the engine."""
    refuse: str = "REFUSE"
    """A prompt with this text is answered with an error completion."""
    load_seconds: float = 0.0
    load_error: Exception | None = None
    has_chat_template: bool = True
    max_model_len: int = 2048
    loaded: list[EngineConfig] = field(default_factory=list)
    closed: list[EngineConfig] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    aborted: list[object] = field(default_factory=list)
    most_in_flight: int = 0

    @asynccontextmanager
    async def factory(self, config: EngineConfig) -> AsyncGenerator[FakeEngine, None]:
        await anyio.sleep(self.load_seconds)
        if self.load_error is not None:
            raise self.load_error
        self.loaded.append(config)
        yield FakeEngine(self)
        self.closed.append(config)


class FakeTokenizer(ByteTokenizer):
    """Bytes; a system message with "REFUSE" in it is refused by the template, "UNTOKENISABLE" by the tokenizer."""

    def __init__(self, has_chat_template: bool = True) -> None:
        super().__init__()
        self._has_chat_template = has_chat_template

    @property
    def has_chat_template(self) -> bool:
        return self._has_chat_template

    def render(self, messages: Any, *, parse_content: bool = False) -> str:
        if any("REFUSE" in message["content"] for message in messages if message["role"] == "system"):
            raise ValueError("System role not supported")
        return super().render(messages, parse_content=parse_content)

    def encode_batch(self, texts: Any, *, special_tokens: bool = True) -> list[list[int]]:
        if any("UNTOKENISABLE" in text for text in texts):
            raise RuntimeError("the tokenizer broke")
        return super().encode_batch(texts, special_tokens=special_tokens)


class FakeEngine:
    """Answers a prompt with its text in upper case, one step for each character, unless the script says otherwise."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.tokenizer = FakeTokenizer(script.has_chat_template)
        self.max_model_len = script.max_model_len
        self.report: dict[str, Any] = {"name": "fake", "content_hash": "0", "speculator": {"verify": "exact"}}
        self.in_flight = 0

    def snapshot(self) -> EngineSnapshot:
        return EngineSnapshot(running=self.in_flight)

    async def stream(
        self, requests: Iterable[Request], *, ahead: int | None = None
    ) -> AsyncGenerator[Completion, None]:
        pending = {request.id: request for request in requests}
        self.script.requests.extend(pending.values())
        self.in_flight += len(pending)
        self.script.most_in_flight = max(self.script.most_in_flight, self.in_flight)
        try:
            for request in list(pending.values()):
                await anyio.lowlevel.checkpoint()
                text = self.tokenizer.decode(request.prompt_token_ids)
                if self.script.fail in text:
                    raise RuntimeError("the device is gone")
                if self.script.hold not in text:
                    self.in_flight -= 1
                    del pending[request.id]
                    yield self._answer(request, text)
            while pending:
                await anyio.sleep(1)
        finally:
            self.in_flight -= len(pending)
            self.script.aborted.extend(pending)

    def _answer(self, request: Request, text: str) -> Completion:
        refused = self.script.refuse in text
        stats = AcceptanceStats()
        answer = "" if refused else text.upper()[: request.params.max_tokens]
        for _ in answer:
            stats.count_step(drafted=0, accepted=0, trimmed=0, reached=0)
        return Completion(
            request_id=request.id,
            sample=request.sample,
            token_ids=tuple(answer.encode()),
            text=answer,
            finish_reason=FinishReason.ERROR if refused else FinishReason.EOS,
            num_prompt_tokens=len(request.prompt_token_ids),
            stats=stats,
            timings=Timings(),
            method="none",
            error_code="prompt_too_long" if refused else None,
            error_message="does not fit" if refused else None,
        )
