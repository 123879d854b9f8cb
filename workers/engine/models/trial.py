"""Run an executor by hand, outside an engine: a few sequences and a cache of their own."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

import torch

from workers.engine.api.request import Request
from workers.engine.models.executor import Executor
from workers.engine.state.batch import Batch, Feed
from workers.engine.state.kv_cache import KVCache
from workers.engine.state.sequence import Sequence
from workers.engine.state.tree import DraftTree


class Trial:
    """An executor and a small cache; every pass feeds what it is told to."""

    def __init__(self, executor: Executor, *, num_blocks: int = 32, block_size: int = 16) -> None:
        self.executor = executor
        self.cache = KVCache(executor.facts.cache_shape, num_blocks, block_size, prefix_reuse=False)
        self._count = 0

    def open(self, tokens: Iterable[int], *, room: int = 0) -> Sequence:
        """A sequence with nothing cached and `room` slots behind it for a tree."""
        self._count += 1
        seq = Sequence(Request(self._count, tuple(tokens)), self._count, frozenset(), self.executor.facts.max_model_len)
        self.cache.open(seq)
        if not self.cache.reserve(seq, len(seq) + room):
            raise ValueError(f"{len(seq) + room} tokens do not fit into what is left of {self.cache.num_blocks} blocks")
        return seq

    def run(self, feeds: Seq[Feed]) -> list[torch.Tensor]:
        """One pass; per feed the logits of its rows that need them, [rows, V]."""
        batch = Batch.pack(feeds, self.cache)
        logits = self.executor.forward(batch, self.cache).logits
        ends = (*batch.logits_offsets[1:], len(logits))
        counts = [(feed.end > feed.start) + len(feed.tree) - feed.first_node if feed.logits else 0 for feed in feeds]
        parts = zip(batch.logits_offsets, ends, counts, strict=True)
        return [logits[start : min(end, start + count)] for start, end, count in parts]

    def chain(self, tokens: Seq[int]) -> torch.Tensor:
        """Logits of every position of a fresh sequence, [T, V]: its first token is the root, the rest a chain."""
        seq = self.open(tokens[:1], room=len(tokens))
        logits = self.run([Feed(seq, 0, 1, DraftTree.chain(tokens[1:]))])[0]
        self.cache.free(seq)
        return logits
