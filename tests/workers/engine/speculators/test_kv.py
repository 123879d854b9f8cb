"""Keys, values and features after any accepting, rejecting and preempting equal those of a fresh pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from pathlib import Path

import pytest
import torch

from tests.support.drafts.caches import Prefill, assert_same, watch
from tests.support.drafts.eagle_runs import Run
from tests.support.drafts.weights import LAYER, eagle1_tensors, eagle3_tensors, safeailab3, tiny_target, write_eagle
from tests.support.engine.runs import mixed_requests, run
from workers.engine import EngineConfig, EngineCore, SpeculationConfig
from workers.engine.api.tree_shape import TreeShape
from workers.engine.speculators.draft_model.reading import SameReading
from workers.engine.speculators.draft_model.speculator import DraftModelSpeculator
from workers.engine.speculators.eagle.speculator import EagleSpeculator
from workers.engine.speculators.speculator import SpeculatorContext
from workers.engine.state.batch import Feed
from workers.engine.state.kv_cache import KVCache
from workers.engine.state.sequence import Sequence
from workers.engine.state.tree import DraftTree


@pytest.mark.parametrize("shape", [TreeShape(), TreeShape(3), TreeShape(4, 10)], ids=["chain", "beam", "dynamic"])
def test_eagle(shape: TreeShape, tmp_path: Path) -> None:
    """Entries of the draft come from the target's features alone, never from drafted ones."""
    target = tiny_target()
    draft = write_eagle(tmp_path, LAYER, eagle1_tensors(near=0.03))
    checked = 0

    def inner(context: SpeculatorContext) -> EagleSpeculator:
        speculation = SpeculationConfig(method="eagle", draft=draft)
        config = EngineConfig(target="tiny", speculation=speculation, block_size=4, max_step_tokens=40, kv_blocks=30)
        made = EagleSpeculator.create(SpeculatorContext(config, context.target, context.cache))
        return EagleSpeculator(made.model, made.cache, context.cache, shape=shape, max_step_tokens=40)

    def check(speculator: EagleSpeculator, seq: Sequence, features: torch.Tensor) -> None:
        nonlocal checked
        speculator.cache.check()
        if not speculator.cache.holds(seq):
            return
        count = speculator.cache.num_cached(seq)
        assert count <= len(seq) - 1
        fresh = Run(speculator.model)
        other = fresh.open(0, seq.tokens)
        final = features[:, -speculator.model.config.feature_size :]
        fresh.entries([Feed(other, 0, len(seq) - 1)], {other: final})
        assert_same(speculator.cache, fresh.cache, seq, other, count)
        checked += count > 0

    watch(target, inner, check)
    assert checked >= 150


def test_after_a_proposal_every_entry_is_there(tmp_path: Path) -> None:
    """Draft cached = committed - 1, also after steps without a draft and for prompts that are longer than a pass."""
    target = tiny_target()
    draft = write_eagle(tmp_path, safeailab3(), eagle3_tensors())
    config = EngineConfig(
        target="tiny", kv_blocks=200, block_size=4, max_step_tokens=7, max_batch=4,
        speculation=SpeculationConfig(method="eagle", draft=draft, policy="fixed", max_draft_tokens=3),
    )  # fmt: skip
    seen: Counter[int] = Counter()

    class Checked(EagleSpeculator):
        def propose(self, seqs: Seq[Sequence], lengths: Seq[int]) -> list[DraftTree]:
            rests = [length if len(seq) % 5 < 2 else 0 for seq, length in zip(seqs, lengths, strict=True)]
            before = {seq: self.cache.num_cached(seq) for seq in seqs}
            trees = super().propose(seqs, rests)
            for seq, tree in zip(seqs, trees, strict=True):
                if len(tree):
                    assert self.cache.num_cached(seq) == len(seq) - 1
                    seen[len(seq) - 1 - before[seq]] += 1
            return trees

    core = EngineCore(config, model=target, make=lambda context: {"eagle": Checked.create(context)})
    run(core, mixed_requests(8, seed=3, max_tokens=24))
    assert max(seen) > 7, "a prompt was caught up in several passes"
    assert len(seen) >= 4, "plain steps in between were caught up"


def test_draft_model() -> None:
    target, draft = tiny_target(), tiny_target(context=0.16)
    fresh = Prefill(draft.executor)

    def inner(context: SpeculatorContext) -> DraftModelSpeculator:
        cache = KVCache(draft.facts.cache_shape, 60, 4)
        reading = SameReading(TreeShape(3), draft.facts.vocab_size)
        return DraftModelSpeculator(draft.executor, cache, reading, max_step_tokens=40)

    def check(speculator: DraftModelSpeculator, seq: Sequence, features: torch.Tensor) -> None:
        if speculator.cache.holds(seq):
            fresh.compare(speculator.cache, seq, speculator.cache.num_cached(seq))

    watch(target, inner, check)
