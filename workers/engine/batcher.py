"""The Batcher: which sequences run in the coming step, and what each of them feeds (continuous batching)."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from workers.engine.batch import Feed
from workers.engine.config import EngineConfig
from workers.engine.errors import EmptyPrompt, InvalidParams, PromptTooLong
from workers.engine.kv_cache import KVCache
from workers.engine.models.executor import Executor
from workers.engine.models.loading import context_length
from workers.engine.request import Request
from workers.engine.sampler import validate_params
from workers.engine.sequence import Sequence


def pool_blocks(config: EngineConfig, target: Executor) -> int:
    """Blocks of the target's KV pool."""
    longest_use = config.max_batch * context_length(config, target)
    by_memory = config.kv_memory // (target.cache_shape.bytes_per_token() * config.block_size)
    return max(1, config.kv_blocks or min(by_memory, -(-longest_use // config.block_size)))


def check_request(request: Request, config: EngineConfig, target: Executor) -> None:
    """Whether a request could ever run, alone if need be. Needs the target's sizes, not its weights.

    Raises `EmptyPrompt`, `PromptTooLong` or `InvalidParams`.
    """
    prompt, params = request.prompt_token_ids, request.params
    limit, vocab = context_length(config, target), target.vocab_size
    if not prompt:
        raise EmptyPrompt("the prompt has no tokens")
    if len(prompt) >= limit:
        raise PromptTooLong(f"the prompt has {len(prompt)} tokens; the context of {limit} leaves no room for an answer")
    if not 0 <= min(prompt) <= max(prompt) < vocab:
        raise InvalidParams(f"prompt token ids must lie in 0..{vocab - 1}, got {min(prompt)}..{max(prompt)}")
    validate_params(params, vocab)
    if request.method is not None and request.method not in config.speculation.methods:
        raise InvalidParams(
            f"method {request.method!r} is not set up; this engine has {', '.join(config.speculation.methods)}"
        )
    longest, capacity = min(len(prompt) + params.max_tokens, limit), pool_blocks(config, target) * config.block_size
    if longest > capacity:
        raise PromptTooLong(
            f"prompt ({len(prompt)}) and max_tokens ({params.max_tokens}) may reach {longest} tokens, but "
            f"the KV cache holds {capacity}; raise kv_memory or kv_blocks, or lower max_tokens"
        )


class Batcher:
    """Two queues and one rule: admitted sequences advance in order of admission, the rest wait.

    There is no prefill phase: each sequence feeds the tokens that its cache lacks, bounded by the step's token budget.
    When the pool runs out the latest admitted sequence gives its blocks up, waits first in line, and is computed again.
    The first in order is never preempted for another, so it always advances.
    """

    def __init__(
        self, cache: KVCache, *, max_batch: int, max_step_tokens: int, on_preempt: Callable[[Sequence], None]
    ) -> None:
        self._cache = cache
        self._max_batch = max_batch
        self._max_step_tokens = max_step_tokens
        self._on_preempt = on_preempt
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    def submit(self, seq: Sequence) -> None:
        """Queue a sequence whose request `check_request` has let in."""
        self.waiting.append(seq)

    def schedule(self) -> list[Feed]:
        """Choose the feeds of the coming step and reserve their KV; trees are added later, where room is left."""
        feeds: list[Feed] = []
        budget = self._advance_running(feeds, self._max_step_tokens)
        self._admit_waiting(feeds, budget)
        return feeds

    def retire(self, seq: Sequence) -> None:
        """Forget a finished or aborted sequence and free its blocks."""
        if seq in self.running:
            self.running.remove(seq)
            self._cache.free(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)

    def _advance_running(self, feeds: list[Feed], budget: int) -> int:
        for seq in list(self.running):
            if budget == 0 or seq not in self.running:
                break
            start = self._cache.num_cached(seq)
            end = min(len(seq), start + budget)
            if not self._make_room(seq, end):
                break
            feeds.append(self._feed(seq, start, end))
            budget -= end - start
        return budget

    def _make_room(self, seq: Sequence, num_tokens: int) -> bool:
        while not self._cache.reserve(seq, num_tokens):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _preempt(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._cache.free(seq)
        self._on_preempt(seq)
        self.waiting.appendleft(seq)
        seq.num_preemptions += 1
        self.num_preemptions += 1

    def _admit_waiting(self, feeds: list[Feed], budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self._max_batch:
            seq = self.waiting[0]
            start = self._cache.open(seq)
            # The whole prompt and one token more: a sequence that cannot take its first step only causes preemptions.
            if not self._cache.reserve(seq, min(len(seq) + 1, seq.max_len)):
                self._cache.free(seq)
                return
            self.waiting.popleft()
            self.running.append(seq)
            if seq.admitted is None:
                seq.admitted = time.monotonic()
            end = min(len(seq), start + budget)
            feeds.append(self._feed(seq, start, end))
            budget -= end - start

    def _feed(self, seq: Sequence, start: int, end: int) -> Feed:
        self._cache.announce(seq, end)
        return Feed(seq, start, end, logits=end == len(seq))
