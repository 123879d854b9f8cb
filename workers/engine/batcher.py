"""The Batcher: which sequences run in the coming step, and what each of them feeds (continuous batching)."""

from __future__ import annotations

import reprlib
import time
from array import array
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any

from workers.engine.api.config import EngineConfig
from workers.engine.api.errors import EmptyPrompt, InvalidParams, PromptTooLong
from workers.engine.api.request import Request
from workers.engine.api.sampling_params import SamplingParams
from workers.engine.models.facts import ModelFacts
from workers.engine.models.loading.load import context_length
from workers.engine.sampler import validate_params
from workers.engine.state.batch import Feed
from workers.engine.state.kv_cache import KVCache
from workers.engine.state.sequence import Sequence

_ID_LISTS = (list, tuple, range, array, bytes, bytearray)
"""Kinds of lists whose items are plain integers, and which cannot fail to give them."""


def check_request(request: Request, config: EngineConfig, target: ModelFacts, capacity: int) -> None:
    """Whether a request could ever run, alone if need be, in a KV cache for `capacity` tokens.

    Raises `EmptyPrompt`, `PromptTooLong` or `InvalidParams`, whatever stands in the request's fields.
    """
    _check_fields(request)
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
    longest = min(len(prompt) + params.max_tokens, limit)
    if longest > capacity:
        raise PromptTooLong(
            f"prompt ({len(prompt)}) and max_tokens ({params.max_tokens}) may reach {longest} tokens, but "
            f"the KV cache holds {capacity}; raise kv_memory or kv_blocks, or lower max_tokens"
        )


def _check_fields(request: Request) -> None:
    """Raise `InvalidParams` for a field of another type than its own: nothing may fail on it later, in a step that
    others share."""
    prompt: Any = request.prompt_token_ids
    if not isinstance(prompt, _ID_LISTS):
        raise InvalidParams(f"prompt_token_ids must be a list of integers, got {_described(prompt)}")
    kinds = {type(token) for token in prompt}
    if wrong := [kind for kind in kinds if kind is not int]:
        at, token = next((at, token) for at, token in enumerate(prompt) if type(token) is wrong[0])
        raise InvalidParams(f"prompt_token_ids must be integers, got {token!r} ({wrong[0].__name__}) at {at}")
    if not isinstance(request.params, SamplingParams):
        raise InvalidParams(f"params must be SamplingParams, got {_described(request.params)}")
    if type(request.sample) is not int or request.sample < 0:
        raise InvalidParams(f"sample must be an integer of at least 0, got {request.sample!r}")
    if not (request.method is None or isinstance(request.method, str)):
        raise InvalidParams(f"method must be a name, got {request.method!r}")
    try:
        hash(request.scope)
    except TypeError as error:
        raise InvalidParams(f"scope must be hashable, got {_described(request.scope)}") from error


def _described(value: Any) -> str:
    return f"{reprlib.repr(value)} ({type(value).__name__})"


class Batcher:
    """Two queues: admitted sequences advance in order of admission, the others wait.

    A sequence that is too big for the free blocks waits, and up to `max_batch` smaller ones behind it are admitted
    before it. After that no other is admitted until it is. So the pool is used, and it does not wait for ever.

    There is no prefill phase: each sequence feeds the tokens that its cache lacks, bounded by the step's token budget.
    When the pool runs out, the sequence that was admitted last is preempted: its blocks are freed, it waits first in
    line, and is computed again. The first in order is never preempted for another, so there is always progress.
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
            if budget == 0 or seq not in self.running:  # a sequence before it may have preempted it
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
            # The latest admitted, so that the first always advances and preemption comes to an end.
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
            seq = self._take_next()
            if seq is None:
                return
            self.running.append(seq)
            if seq.admitted is None:
                seq.admitted = time.monotonic()
            start = self._cache.num_cached(seq)
            end = min(len(seq), start + budget)
            feeds.append(self._feed(seq, start, end))
            budget -= end - start

    def _take_next(self) -> Sequence | None:
        """The first waiting sequence that the pool has room for, its room reserved; None: none may be admitted."""
        for place, seq in enumerate(islice(self.waiting, 1 + self._max_batch)):
            if self._fits(seq, first=place == 0):
                del self.waiting[place]
                for passed in islice(self.waiting, place):
                    passed.num_overtaken += 1
                return seq
            if seq.num_overtaken >= self._max_batch:
                # It was passed often enough: blocks that are freed from now on are kept for it.
                return None
        return None

    def _fits(self, seq: Sequence, *, first: bool) -> bool:
        """Reserve the whole prompt and one token more: a sequence that cannot take its first step only causes
        preemptions. Known prefixes, which take time to find, count for the first in line alone."""
        needed = min(len(seq) + 1, seq.max_len)
        if not first and self._cache.blocks_for(needed) > self._cache.num_free:
            return False
        self._cache.open(seq)
        if self._cache.reserve(seq, needed):
            return True
        self._cache.free(seq)
        return False

    def _feed(self, seq: Sequence, start: int, end: int) -> Feed:
        self._cache.announce(seq, end)
        return Feed(seq, start, end, logits=end == len(seq))
