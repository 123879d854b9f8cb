"""A smaller causal LM proposes: a chain, or a tree of any `TreeShape`.

It draws with the target's own noise, argmax(log q + g), so where draft and target agree on the distribution they
agree on the token, at any temperature.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from workers.engine.batch import Batch, Feed
from workers.engine.kv_cache import KVCache
from workers.engine.models.executor import Executor
from workers.engine.models.loading import load_draft
from workers.engine.sequence import Sequence
from workers.engine.speculators.growth import TreeGrowth, extend_all
from workers.engine.speculators.speculator import SpeculatorContext
from workers.engine.tree import EMPTY, DraftTree
from workers.engine.tree_shape import TreeShape
from workers.engine.verifier import Verdict


class DraftModelSpeculator:
    """Keeps a KV cache of its own, which catches up with whatever was emitted since it last drafted."""

    name = "draft_model"
    hidden_layers = ()

    def __init__(
        self, executor: Executor, cache: KVCache, *, shape: TreeShape, target_vocab: int, max_step_tokens: int
    ) -> None:
        self.cache = cache
        self._shape = shape
        self._executor = executor
        self._target_vocab = target_vocab
        self._max_step_tokens = max_step_tokens
        self._growths: dict[Sequence, TreeGrowth] = {}
        """The last trees; their expanded nodes have draft KV."""

    @classmethod
    def create(cls, context: SpeculatorContext) -> DraftModelSpeculator:
        config = context.config
        draft = load_draft(config, context.target)
        cache = KVCache(
            draft.executor.cache_shape, context.cache.num_blocks, config.block_size, prefix_reuse=config.prefix_reuse
        )
        return cls(
            draft.executor,
            cache,
            shape=config.speculation.tree_shape,
            target_vocab=context.target.executor.vocab_size,
            max_step_tokens=config.max_step_tokens,
        )

    def max_nodes(self, length: int) -> int:
        return self._shape.max_nodes(length)

    def propose(self, seqs: Seq[Sequence], lengths: Seq[int]) -> list[DraftTree]:
        self._growths = {
            seq: TreeGrowth(seq, length, self._shape, self._target_vocab)
            for seq, length in zip(seqs, lengths, strict=True)
            if length > 0 and self._reserve(seq, length)
        }
        self._catch_up(list(self._growths))
        while growing := [growth for growth in self._growths.values() if growth.growing]:
            self._grow_level(growing)
        return [self._growths[seq].tree() if seq in self._growths else EMPTY for seq in seqs]

    def _reserve(self, seq: Sequence, length: int) -> bool:
        longest = len(seq) + self._shape.max_expanded(length)
        if longest > self._executor.max_model_len:
            return False
        if not self.cache.holds(seq):
            self.cache.open(seq)
        return self.cache.reserve(seq, longest)

    def _catch_up(self, seqs: Seq[Sequence]) -> None:
        """Feed what the draft's cache lacks, all but each last token, within the token budget of a pass."""
        behind = [seq for seq in seqs if len(seq) - 1 > self.cache.num_cached(seq)]
        while sum(len(seq) - self.cache.num_cached(seq) for seq in behind) > self._max_step_tokens:
            feeds: list[Feed] = []
            budget = self._max_step_tokens
            for seq in behind:
                start = self.cache.num_cached(seq)
                end = min(len(seq) - 1, start + budget)
                if end > start:
                    feeds.append(self._feed(seq, start, end))
                    budget -= end - start
            self._executor.forward(Batch.pack(feeds, self.cache), self.cache)
            for feed in feeds:
                self.cache.commit(feed.seq, feed.end)
            behind = [seq for seq in behind if len(seq) - 1 > self.cache.num_cached(seq)]

    def _feed(self, seq: Sequence, start: int, end: int) -> Feed:
        self.cache.announce(seq, end)
        return Feed(seq, start, end, logits=end == len(seq))

    def _grow_level(self, growing: Seq[TreeGrowth]) -> None:
        """One draft pass over every frontier: the last tokens first, then the newest nodes."""
        feeds = [self._frontier(growth) for growth in growing]
        logits = self._executor.forward(Batch.pack(feeds, self.cache), self.cache).logits
        for growth, feed in zip(growing, feeds, strict=True):
            if feed.end > feed.start:
                self.cache.commit(growth.seq, feed.end)
        extend_all(growing, logits)

    def _frontier(self, growth: TreeGrowth) -> Feed:
        seq = growth.seq
        if growth.num_expanded == 0:
            return self._feed(seq, min(self.cache.num_cached(seq), len(seq) - 1), len(seq))
        return Feed(seq, len(seq), len(seq), growth.expanded_tree(), first_node=growth.first_of_frontier)

    def update(self, verdicts: Seq[Verdict]) -> None:
        moves = []
        for verdict in verdicts:
            seq = verdict.seq
            growth = self._growths.pop(seq, None)
            if growth is not None:
                first = len(seq) - verdict.emitted
                path = growth.expanded_path(verdict.path)
                moves.append((seq, first, path))
                self.cache.commit(seq, first + len(path))
        self.cache.gather_paths(moves)

    def release(self, seq: Sequence) -> None:
        self._growths.pop(seq, None)
        self.cache.free(seq)
