"""A smaller causal LM proposes: a chain, or a tree of any `TreeShape`.

Under the coupled rule it draws with the target's own noise, argmax(log q + g), so where draft and target agree on the
distribution they agree on the token, at any temperature.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from workers.engine.api.config import EngineConfig
from workers.engine.models.executor import Executor, LoadedModel, Model
from workers.engine.models.kv_memory import DraftMemory
from workers.engine.models.loading.load import load_draft, outline_draft
from workers.engine.speculators.draft_model.reading import Reading, choose_reading
from workers.engine.speculators.shared.catching_up import catch_up
from workers.engine.speculators.shared.growth import TreeGrowth
from workers.engine.speculators.speculator import DraftVocabulary, LoadedDraft, Speculator, SpeculatorContext
from workers.engine.state.batch import Batch, Feed
from workers.engine.state.kv_cache import KVCache
from workers.engine.state.sequence import Sequence
from workers.engine.state.tree import EMPTY, DraftTree
from workers.engine.verifier import Verdict


class DraftModelSpeculator(Speculator):
    """Keeps a KV cache of its own, which catches up with whatever was emitted since it last drafted.

    The cache holds sequences as the draft reads them (`reading`), which are the target's own unless the two have
    different vocabularies.
    """

    name = "draft_model"
    cache: KVCache

    def __init__(
        self,
        executor: Executor,
        cache: KVCache,
        reading: Reading,
        *,
        max_step_tokens: int,
        draft: LoadedDraft | None = None,
    ) -> None:
        self.draft = draft
        self.executor = executor
        self.cache = cache
        self.reading = reading
        if (both := reading.vocabulary) is not None:
            self.vocabulary = DraftVocabulary(reading.kind, both.overlap, both.coverage)
        self._max_step_tokens = max_step_tokens
        self._growths: dict[Sequence, tuple[TreeGrowth, int]] = {}
        """By the target's sequence: its last tree, whose expanded nodes have draft KV, and where these begin."""

    @classmethod
    def create(cls, context: SpeculatorContext) -> DraftModelSpeculator:
        config = context.config
        draft = load_draft(config, context.target)
        cache = KVCache(
            draft.facts.cache_shape, context.cache.num_blocks, config.block_size, prefix_reuse=config.prefix_reuse
        )
        reading = choose_reading(config, context.target, draft)
        return cls(
            draft.executor,
            cache,
            reading,
            max_step_tokens=config.max_step_tokens,
            draft=None if draft is context.target else _loaded(draft),
        )

    @classmethod
    def check(cls, config: EngineConfig, target: Model) -> DraftMemory:
        draft = outline_draft(config, target)
        choose_reading(config, target, draft)
        return DraftMemory(cache=draft.facts.cache_shape)

    def max_nodes(self, length: int) -> int:
        return self.reading.shape.max_nodes(length)

    def propose(self, seqs: Seq[Sequence], lengths: Seq[int]) -> list[DraftTree]:
        depths = {seq: n for seq, n in zip(seqs, lengths, strict=True) if n > 0 and self._reserve(seq, n)}
        reads = {seq: self.reading.of(seq) for seq in depths}
        self._growths = {seq: (self.reading.grow(seq, n), len(reads[seq])) for seq, n in depths.items()}
        self._catch_up(list(reads.values()))
        while growing := [(reads[seq], growth) for seq, (growth, _) in self._growths.items() if growth.growing]:
            self._grow_level(growing)
        return [
            self.reading.proposal(seq, self._growths[seq][0], depths[seq]) if seq in depths else EMPTY for seq in seqs
        ]

    def _reserve(self, seq: Sequence, length: int) -> bool:
        read = self.reading.of(seq)
        longest = len(read) + self.reading.shape.max_expanded(length)
        if longest > self.executor.facts.max_model_len:
            return False
        if not self.cache.holds(read):
            self.cache.open(read)
        return self.cache.reserve(read, longest)

    def _catch_up(self, seqs: Seq[Sequence]) -> None:
        """Feed what the draft's cache lacks, but for what fits into the pass that drafts."""
        for feeds in catch_up(self.cache, {seq: len(seq) for seq in seqs}, self._max_step_tokens):
            self.executor.forward(Batch.pack(feeds, self.cache), self.cache)
            for feed in feeds:
                self.cache.commit(feed.seq, feed.end)

    def _feed(self, seq: Sequence, start: int, end: int) -> Feed:
        self.cache.announce(seq, end)
        return Feed(seq, start, end, logits=end == len(seq))

    def _grow_level(self, growing: Seq[tuple[Sequence, TreeGrowth]]) -> None:
        """One draft pass over every frontier: the last tokens first, then the newest nodes."""
        feeds = [self._frontier(read, growth) for read, growth in growing]
        logits = self.executor.forward(Batch.pack(feeds, self.cache), self.cache).logits
        for feed in feeds:
            if feed.end > feed.start:
                self.cache.commit(feed.seq, feed.end)
        self.reading.extend([growth for _, growth in growing], logits)

    def _frontier(self, read: Sequence, growth: TreeGrowth) -> Feed:
        if growth.num_expanded == 0:
            return self._feed(read, min(self.cache.num_cached(read), len(read) - 1), len(read))
        return Feed(read, len(read), len(read), self.reading.fed(growth), first_node=growth.first_of_frontier)

    def update(self, verdicts: Seq[Verdict]) -> None:
        moves = []
        for verdict in verdicts:
            growth, first = self._growths.pop(verdict.seq, (None, 0))
            if growth is not None:
                read, path = self.reading.of(verdict.seq), self.reading.stands(verdict, growth)
                moves.append((read, first, path))
                self.cache.commit(read, first + len(path))
        self.cache.gather_paths(moves)

    def release(self, seq: Sequence) -> None:
        self._growths.pop(seq, None)
        read = self.reading.release(seq)
        if read is not None:
            self.cache.free(read)


def _loaded(draft: LoadedModel) -> LoadedDraft:
    return LoadedDraft(draft.name, draft.content_hash, draft.report.dtype, draft.executor.weight_bytes)
