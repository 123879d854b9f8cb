"""Drive an executor by hand: sequences, a cache, and passes over any mix of their tokens and trees."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

import torch

from workers.engine.batch import Batch, Feed
from workers.engine.kv_cache import KVCache
from workers.engine.models.executor import Executor
from workers.engine.request import Request
from workers.engine.sequence import Sequence
from workers.engine.tree import DraftTree


class Passes:
    """An executor with a cache of its own."""

    def __init__(self, executor: Executor, *, num_blocks: int = 256, block_size: int = 16) -> None:
        self.executor = executor
        self.cache = KVCache(executor.cache_shape, num_blocks, block_size, prefix_reuse=False)
        self._count = 0

    def open(self, tokens: Iterable[int], *, room: int = 0) -> Sequence:
        """A sequence with nothing cached and `room` slots behind it for a tree."""
        self._count += 1
        seq = Sequence(Request(self._count, tuple(tokens)), self._count, frozenset(), self.executor.max_model_len)
        self.cache.open(seq)
        assert self.cache.reserve(seq, len(seq) + room)
        return seq

    def run(self, feeds: Seq[Feed]) -> list[torch.Tensor]:
        """One pass; per feed its logits rows, [rows, V]."""
        batch = Batch.pack(feeds, self.cache)
        logits = self.executor.forward(batch, self.cache).logits
        out = []
        for feed, start in zip(feeds, batch.logits_offsets, strict=True):
            count = (feed.end > feed.start) + len(feed.tree) - feed.first_node if feed.logits else 0
            out.append(logits[start : start + count].clone())
        return out

    def prefill(self, seq: Sequence, upto: int | None = None, *, start: int = 0) -> torch.Tensor:
        """Feed tokens[start:upto]; the last one's logits, [V]."""
        return self.run([Feed(seq, start, len(seq) if upto is None else upto)])[0][-1]

    def every_row(self, tokens: Seq[int]) -> torch.Tensor:
        """Logits of every position of a fresh sequence, fed as its first token and a chain, [T, V]."""
        seq = self.open(tokens[:1], room=len(tokens))
        return self.run([Feed(seq, 0, 1, DraftTree.chain(tokens[1:]))])[0]


def prompt(length: int, seed: int, vocab: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab, (length,), generator=generator).tolist()
