"""Two engines on the same requests, side by side."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from collections.abc import Sequence as Seq

from workers.engine.api.errors import InvalidConfig
from workers.engine.api.request import Completion, FinishReason, Request
from workers.engine.api.stats import AcceptanceStats
from workers.engine.core import EngineCore
from workers.engine.kernels.cpu.runtime import working_clock


class Run:
    """One engine on its way through requests, at most `batch` of them at a time."""

    def __init__(self, core: EngineCore, requests: Seq[Request], batch: int) -> None:
        self.seconds = 0.0
        """Of all steps."""
        self.steps: list[float] = []
        """Seconds of the steps in which `batch` sequences decode, and no prompt is read."""
        self.drafting: list[float] = []
        """What drafting took of those."""
        self.done: dict[Hashable, Completion] = {}
        self._core = core
        self._batch = batch
        self._waiting = deque(requests)
        self._running = 0
        self._finished_tokens = 0

    @property
    def going(self) -> bool:
        return bool(self._waiting) or self._core.has_work

    @property
    def emitted(self) -> int:
        """Tokens so far."""
        return self._finished_tokens + sum(seq.num_emitted for seq in self._core.batcher.running)

    @property
    def stats(self) -> list[AcceptanceStats]:
        """Of the requests that are done."""
        return [completion.stats for completion in self.done.values()]

    def step(self) -> None:
        """One step of the engine. Raises `InvalidConfig` for a request that ends in an error."""
        started = working_clock()
        self._admit()
        full = self._running == self._batch and self._core.is_decoding
        drafted = self._core.profile.seconds.get("draft", 0.0)
        finished = self._core.step()
        seconds = working_clock() - started
        self.seconds += seconds
        if full:
            self.steps.append(seconds)
            self.drafting.append(self._core.profile.seconds["draft"] - drafted)
        for completion in finished:
            self._finish(completion)

    def _admit(self) -> None:
        while self._waiting and self._running < self._batch:
            self._running += 1
            refused = self._core.add(self._waiting.popleft())
            if refused is not None:
                self._finish(refused)

    def _finish(self, completion: Completion) -> None:
        if completion.finish_reason is FinishReason.ERROR:
            raise InvalidConfig(f"prompt {completion.sample} cannot be measured: {completion.error_message}")
        self._running -= 1
        self._finished_tokens += len(completion.token_ids)
        self.done[completion.request_id] = completion


def race(*runs: Run) -> None:
    """Take all to their ends, always stepping the one that is behind: what slows the machine slows all of them."""
    while going := [run for run in runs if run.going]:
        min(going, key=lambda run: run.emitted).step()
