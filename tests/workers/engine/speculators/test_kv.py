"""Keys, values and features after any accepting, rejecting and preempting equal those of a fresh pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path

import pytest
import torch

from tests.workers.engine.helpers import mixed_requests, run
from tests.workers.engine.speculators.drafts import (
    LAYER,
    eagle1_tensors,
    eagle3_tensors,
    safeailab3,
    tiny_target,
    write_eagle,
)
from tests.workers.engine.speculators.test_forward import Run
from workers.engine import EngineConfig, EngineCore, SpeculationConfig
from workers.engine.api.tree_shape import TreeShape
from workers.engine.models.executor import Executor, LoadedModel
from workers.engine.models.trial import Trial
from workers.engine.speculators.draft_model.reading import SameReading
from workers.engine.speculators.draft_model.speculator import DraftModelSpeculator
from workers.engine.speculators.eagle.speculator import EagleSpeculator
from workers.engine.speculators.speculator import Speculator, SpeculatorContext
from workers.engine.state.batch import Feed
from workers.engine.state.kv_cache import FINAL, KVCache
from workers.engine.state.sequence import Sequence
from workers.engine.state.tree import DraftTree
from workers.engine.verifier import Verdict

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
LAYERS = (0, 1, 2, FINAL)


class Watched(Speculator):
    """A speculator whose caches are looked at after every step."""

    def __init__(self, inner: Speculator, look: Callable[[Sequence], None]) -> None:
        self.inner = inner
        self.cache = inner.cache
        self.name = inner.name
        self.hidden_layers = LAYERS
        self.accepted: Counter[int] = Counter()
        self._look = look

    def max_nodes(self, length: int) -> int:
        return self.inner.max_nodes(length)

    def propose(self, seqs: Seq[Sequence], lengths: Seq[int]) -> list[DraftTree]:
        return self.inner.propose(seqs, lengths)

    def update(self, verdicts: Seq[Verdict]) -> None:
        self.inner.update(verdicts)
        for verdict in verdicts:
            self.accepted[len(verdict.path)] += 1
            self._look(verdict.seq)

    def release(self, seq: Sequence) -> None:
        self.inner.release(seq)


def assert_same(cache: KVCache, fresh: KVCache, seq: Sequence, other: Sequence, count: int) -> None:
    """Positions [0, count) of `seq` in `cache` are those of `other` in `fresh`."""
    slots = [cache.slot(seq, position) for position in range(count)]
    expected = [fresh.slot(other, position) for position in range(count)]
    for pools, others in ((cache.keys, fresh.keys), (cache.values, fresh.values)):
        for pool, wanted in zip(pools, others, strict=True):
            torch.testing.assert_close(pool[slots], wanted[expected], **CLOSE)
    for layer in cache.hidden.keys() & fresh.hidden.keys():
        torch.testing.assert_close(cache.hidden[layer][slots], fresh.hidden[layer][expected], **CLOSE)


class Prefill:
    """A fresh pass of a model over a sequence's tokens, all but the last one."""

    def __init__(self, executor: Executor) -> None:
        self._trial = Trial(executor)
        self._trial.cache.keep_hidden(LAYERS)

    def compare(self, cache: KVCache, seq: Sequence, count: int) -> torch.Tensor | None:
        other = self._trial.open(seq.tokens)
        self._trial.run([Feed(other, 0, len(other) - 1)])
        assert_same(cache, self._trial.cache, seq, other, count)
        slots = [self._trial.cache.slot(other, position) for position in range(len(seq) - 1)]
        features = torch.cat([self._trial.cache.hidden[layer][slots] for layer in LAYERS], dim=-1)
        self._trial.cache.free(other)
        return features


def watch(
    target: LoadedModel,
    inner: Callable[[SpeculatorContext], Speculator],
    check_draft: Callable[..., None],
    *,
    depths: int = 4,
) -> Watched:
    """Run requests under pressure; every step's caches are compared."""
    fresh = Prefill(target.executor)
    watched: list[Watched] = []

    def make(context: SpeculatorContext) -> dict[str, Speculator]:
        speculator = inner(context)

        def look(seq: Sequence) -> None:
            features = fresh.compare(context.cache, seq, len(seq) - 1)
            check_draft(speculator, seq, features)

        watched.append(Watched(speculator, look))
        return {speculator.name: watched[0]}

    config = EngineConfig(
        target="tiny", kv_blocks=30, block_size=4, max_batch=12, max_step_tokens=40,
        speculation=SpeculationConfig(method="ngram", policy="fixed", max_draft_tokens=4),
    )  # fmt: skip
    core = EngineCore(config, model=target, make=make)
    run(core, mixed_requests(40, seed=1, max_tokens=24))
    assert core.batcher.num_preemptions >= 5
    assert sum(watched[0].accepted.values()) >= 200
    assert len(watched[0].accepted) >= depths, "drafts were accepted to various depths"
    return watched[0]


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
        cache = KVCache(draft.executor.cache_shape, 60, 4)
        reading = SameReading(TreeShape(3), draft.executor.vocab_size)
        return DraftModelSpeculator(draft.executor, cache, reading, max_step_tokens=40)

    def check(speculator: DraftModelSpeculator, seq: Sequence, features: torch.Tensor) -> None:
        if speculator.cache.holds(seq):
            fresh.compare(speculator.cache, seq, speculator.cache.num_cached(seq))

    watch(target, inner, check)
