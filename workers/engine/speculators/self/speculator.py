"""The target drafts for itself with some of its sublayers left out, over its own KV cache.

A draft pass reads the target's keys and values of the text, and writes its own approximate ones into the slots that the
coming verification pass writes again. So nothing is kept for a sequence, and there is no draft state that could lag.
Draft & Verify (arXiv 2309.08168) found this way of drafting.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

from workers.engine.api.config import EngineConfig
from workers.engine.api.errors import NoSkipSet, UnsupportedModel
from workers.engine.api.tree_shape import TreeShape
from workers.engine.models.executor import LoadedModel, Model, SkippingExecutor
from workers.engine.models.kv_memory import DraftMemory
from workers.engine.models.skipping import SkipSet
from workers.engine.speculators.self.skip_file import SkipFile, a_file_decides
from workers.engine.speculators.shared.drawing import DraftNoise, draft_noise_of
from workers.engine.speculators.shared.growth import TreeGrowth, extend_all
from workers.engine.speculators.speculator import Speculator, SpeculatorContext
from workers.engine.state.batch import Batch, Feed
from workers.engine.state.kv_cache import KVCache
from workers.engine.state.sequence import Sequence
from workers.engine.state.tree import EMPTY, DraftTree


class SelfSpeculator(Speculator):
    """Drafts with `executor` without the sublayers of `skip`; one skip set, whatever the batch."""

    name = "self"

    def __init__(
        self,
        executor: SkippingExecutor,
        cache: KVCache,
        skip: SkipSet,
        *,
        shape: TreeShape,
        vocab_size: int,
        noise: DraftNoise = DraftNoise.COUPLED,
    ) -> None:
        self.skip = skip
        self._executor = executor
        self._cache = cache
        self._shape = shape
        self._vocab_size = vocab_size
        self._noise = noise

    @classmethod
    def create(cls, context: SpeculatorContext) -> SelfSpeculator:
        speculation = context.config.speculation
        return cls(
            skipping(context.target),
            context.cache,
            skip_set_of(context.config, context.target),
            shape=speculation.tree_shape,
            vocab_size=context.target.facts.vocab_size,
            noise=draft_noise_of(speculation),
        )

    @classmethod
    def check(cls, config: EngineConfig, target: Model) -> DraftMemory:
        require_skipping(target)
        skip_set_of(config, target)
        return DraftMemory()

    @property
    def details(self) -> dict[str, Any]:
        return {"skip": list(self.skip.names)}

    def max_nodes(self, length: int) -> int:
        return max(self._shape.max_nodes(length), self._shape.max_expanded(length))

    def propose(self, seqs: Seq[Sequence], lengths: Seq[int]) -> list[DraftTree]:
        growths = {
            seq: TreeGrowth(seq, length, self._shape, self._vocab_size, self._noise)
            for seq, length in zip(seqs, lengths, strict=True)
            if length > 0 and self._cache.num_cached(seq) == len(seq) - 1
        }
        while growing := [growth for growth in growths.values() if growth.growing]:
            batch = Batch.pack([_frontier(growth) for growth in growing], self._cache)
            extend_all(growing, self._executor.forward_skipping(batch, self._cache, self.skip).logits)
        return [growths[seq].tree() if seq in growths else EMPTY for seq in seqs]


def _frontier(growth: TreeGrowth) -> Feed:
    seq = growth.seq
    if growth.num_expanded == 0:
        return Feed(seq, len(seq) - 1, len(seq))
    return Feed(seq, len(seq), len(seq), growth.expanded_tree(), first_node=growth.first_of_frontier)


def skipping(target: LoadedModel) -> SkippingExecutor:
    """The target's executor; raises `UnsupportedModel` when it cannot leave sublayers out."""
    require_skipping(target)
    assert target.skipper is not None
    return target.skipper


def require_skipping(target: Model) -> None:
    """Raise `UnsupportedModel` when the target's executor cannot leave sublayers out."""
    if not target.facts.skips:
        raise UnsupportedModel(
            f"{target.name} cannot skip sublayers, so it cannot draft for itself: method self needs a model of the "
            "Llama family on the CPU"
        )


def skip_set_of(config: EngineConfig, target: Model) -> SkipSet:
    """What the job leaves out: `skip`, `exit_layer`, or what was calibrated for this very target.

    Raises `InvalidConfig` when nothing says, or when it was said for another model.
    """
    speculation, layers = config.speculation, target.facts.cache_shape.num_layers
    if speculation.skip is not None:
        return SkipSet.parse(speculation.skip, layers)
    if speculation.exit_layer is not None:
        return SkipSet.leave_at(speculation.exit_layer, layers)
    return SkipSet.parse(_decided(speculation.skip_file, target).skip, layers)


def with_skip_set(config: EngineConfig, target: Model) -> EngineConfig:
    """The configuration with the skip set in it that a file of this machine decides, so that it means the same on any
    other; as it is where no file decides. Raises what `skip_set_of` raises for files."""
    speculation = config.speculation
    if not a_file_decides(speculation):
        return config
    skip = _decided(speculation.skip_file, target).skip
    return replace(config, speculation=replace(speculation, skip=skip, skip_file=None))


def _decided(path: str | None, target: Model) -> SkipFile:
    found = SkipFile.read(path) if path else SkipFile.find(target)
    if found is None:
        raise NoSkipSet(
            f"method self does not know which sublayers of {target.name} to skip: run `nightdraft calibrate "
            f"--method self --target {target.name}` on some of your prompts, or set skip or exit_layer"
        )
    found.check(target)
    return found
