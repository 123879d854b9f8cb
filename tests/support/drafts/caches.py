"""What speculators keep in caches, compared with a fresh pass after every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch

from tests.support.engine.runs import mixed_requests, run
from workers.engine import EngineConfig, EngineCore, SpeculationConfig
from workers.engine.models.executor import Executor, LoadedModel
from workers.engine.models.trial import Trial
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
