"""EAGLE: a draft layer that reads the target's features. Dynamic trees (EAGLE-2), beams and chains."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from workers.engine.api.config import EngineConfig
from workers.engine.api.tree_shape import TreeShape
from workers.engine.attention.interface import load_attention, resolve_attention
from workers.engine.models.executor import Model
from workers.engine.models.kv_memory import DraftMemory
from workers.engine.models.layers.precision import Precision, choose_precision
from workers.engine.speculators.eagle.checkpoint import EagleConfig, open_eagle
from workers.engine.speculators.eagle.layer import EagleModel, build_eagle, check_eagle
from workers.engine.speculators.shared.catching_up import catch_up
from workers.engine.speculators.shared.checkpoint import Tensors
from workers.engine.speculators.shared.drawing import DraftNoise, draft_noise_of
from workers.engine.speculators.shared.features import require_features
from workers.engine.speculators.shared.growth import TreeGrowth, extend_all
from workers.engine.speculators.speculator import LoadedDraft, Speculator, SpeculatorContext
from workers.engine.state.batch import Batch, Feed
from workers.engine.state.kv_cache import CacheShape, KVCache
from workers.engine.state.sequence import Sequence
from workers.engine.state.tree import EMPTY, DraftTree
from workers.engine.verifier import Verdict

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class EagleSpeculator(Speculator):
    """Keeps a draft KV cache whose committed entries come from features of the target alone.

    With n tokens verified, entries [0, n - 1) can be made; after a proposal all of them are there. Entries of drafted
    tokens lie behind them, made of the drafter's own outputs, and are provisional: nothing of them is ever kept.
    """

    name = "eagle"
    cache: KVCache

    def __init__(
        self,
        model: EagleModel,
        cache: KVCache,
        target_cache: KVCache,
        *,
        shape: TreeShape,
        max_step_tokens: int,
        noise: DraftNoise = DraftNoise.COUPLED,
        draft: LoadedDraft | None = None,
    ) -> None:
        self.draft = draft
        self.cache = cache
        self.model = model
        self.hidden_layers = model.config.feature_layers
        self._target_cache = target_cache
        self._shape = shape
        self._max_step_tokens = max_step_tokens
        self._noise = noise
        self._ready: set[Sequence] = set()
        """Sequences which emitted since they were admitted: the target has been through all of their tokens but one."""

    @classmethod
    def create(cls, context: SpeculatorContext) -> EagleSpeculator:
        config, speculation = context.config, context.config.speculation
        eagle, tensors = _open(config, context.target)
        precision, attention = _backend(config, context.target.facts.cache_shape)
        model = build_eagle(eagle, tensors, context.target, load_attention(attention), precision)
        cache = KVCache(
            model.cache_shape, context.cache.num_blocks, config.block_size, prefix_reuse=config.prefix_reuse, shift=1
        )
        return cls(
            model,
            cache,
            context.cache,
            shape=speculation.tree_shape,
            max_step_tokens=config.max_step_tokens,
            noise=draft_noise_of(speculation),
            draft=LoadedDraft(str(speculation.draft), tensors.content_hash, str(precision), model.weight_bytes),
        )

    @classmethod
    def check(cls, config: EngineConfig, target: Model) -> DraftMemory:
        eagle, tensors = _open(config, target)
        precision, _ = _backend(config, target.facts.cache_shape)
        check_eagle(eagle, tensors, target.facts)
        return DraftMemory(eagle.feature_layers, eagle.cache_shape(precision.dtype, precision.device))

    def max_nodes(self, length: int) -> int:
        return self._shape.max_nodes(length)

    @torch.inference_mode()
    def propose(self, seqs: Seq[Sequence], lengths: Seq[int]) -> list[DraftTree]:
        vocab = self.model.config.target_vocab
        growths = {
            seq: TreeGrowth(seq, length, self._shape, vocab, self._noise)
            for seq, length in zip(seqs, lengths, strict=True)
            if length > 0 and seq in self._ready and self._reserve(seq, length)
        }
        if growths:
            self._grow(list(growths.values()))
        return [growths[seq].tree() if seq in growths else EMPTY for seq in seqs]

    def _reserve(self, seq: Sequence, length: int) -> bool:
        if not self.cache.holds(seq):
            self.cache.open(seq)
        return self.cache.reserve(seq, len(seq) - 1 + self._shape.max_expanded(length))

    def _grow(self, growths: Seq[TreeGrowth]) -> None:
        outputs = self._catch_up([growth.seq for growth in growths])
        # Where in `outputs` those of the root and of each expanded node are.
        rows = {growth.seq: [row] for row, growth in enumerate(growths)}
        extend_all(growths, self.model.logits(outputs))
        while growing := [growth for growth in growths if growth.growing]:
            new = self._run_frontiers(growing, rows, outputs)
            end = len(outputs)
            for growth in growing:
                start, end = end, end + len(growth.frontier_paths())
                rows[growth.seq].extend(range(start, end))
            outputs = torch.cat([outputs, new])
            extend_all(growing, self.model.logits(new))

    def _run_frontiers(
        self, growing: Seq[TreeGrowth], rows: dict[Sequence, list[int]], outputs: torch.Tensor
    ) -> torch.Tensor:
        """One pass over the newest nodes of all trees, each with its parent's output as feature."""
        feeds: list[Feed] = []
        parents: list[int] = []
        for growth in growing:
            seq, tree, first = growth.seq, growth.expanded_tree(), growth.first_of_frontier
            feeds.append(Feed(seq, len(seq) - 1, len(seq) - 1, tree, first_node=first, logits=False))
            parents.extend(rows[seq][parent + 1] for parent in tree.parents[first:])
        return self.model.forward(Batch.pack(feeds, self.cache), outputs[parents], self.cache)

    # ------------------------------------------------------------ catching up

    def _catch_up(self, seqs: Seq[Sequence]) -> torch.Tensor:
        """Make the entries that the draft's cache lacks; returns the output of each sequence's last one, [B, N]."""
        ends = {seq: len(seq) - 1 for seq in seqs}
        for feeds in catch_up(self.cache, ends, self._max_step_tokens):
            self._make_entries(feeds)
        last = [Feed(seq, self.cache.num_cached(seq), end) for seq, end in ends.items()]
        for feed in last:
            self.cache.announce(feed.seq, feed.end)
        batch, outputs = self._make_entries(last)
        return outputs[batch.logits_rows[: len(last)]]

    def _make_entries(self, feeds: Seq[Feed]) -> tuple[Batch, torch.Tensor]:
        """The pass over these entries, and the output of each row, [T, N]."""
        batch = Batch.pack(feeds, self.cache)
        outputs = self.model.forward(batch, self.model.encode(self._features(feeds)), self.cache)
        for feed in feeds:
            self.cache.commit(feed.seq, feed.end)
        return batch, outputs

    def _features(self, feeds: Seq[Feed]) -> torch.Tensor:
        """The target's hidden states where these entries need them, layers side by side."""
        slot = self._target_cache.slot
        slots = [slot(feed.seq, position) for feed in feeds for position in range(feed.start, feed.end)]
        index = torch.tensor(slots, device=self._target_cache.shape.device)
        return torch.cat([self._target_cache.hidden[layer][index] for layer in self.hidden_layers], dim=-1)

    def update(self, verdicts: Seq[Verdict]) -> None:
        self._ready.update(verdict.seq for verdict in verdicts)

    def release(self, seq: Sequence) -> None:
        self._ready.discard(seq)
        self.cache.free(seq)


def _open(config: EngineConfig, target: Model) -> tuple[EagleConfig, Tensors]:
    assert config.speculation.draft is not None
    require_features(target, "eagle")
    return open_eagle(config.speculation.draft, target.facts.cache_shape, target.facts.vocab_size)


def _backend(config: EngineConfig, target: CacheShape) -> tuple[Precision, str]:
    """Precision of the draft layer, and the attention that runs it."""
    dtype = target.dtype if target.dtype in _DTYPES else torch.float32
    precision = choose_precision(config.speculation, dtype, target.device)
    return precision, resolve_attention(config.attention, target.device, precision.dtype)
