"""Which sublayers the target drafts best without: a search on the user's own prompts.

Each candidate set costs one pass: every position of the target's own greedy answers at once, each of which reads the
target's keys and values of the text before it, as the first token of a draft does. What counts is the speedup that its
acceptance and its cost promise, so that a set is neither too timid nor too bold.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

from workers.engine.api.config import EngineConfig
from workers.engine.api.errors import InvalidConfig
from workers.engine.measure.skip_search import Judged, Progress, SkipSearch
from workers.engine.measure.speedup import best_length
from workers.engine.models.executor import LoadedModel, SkippingExecutor
from workers.engine.models.loading.load import load_model
from workers.engine.models.skipping import NOTHING, SkipSet
from workers.engine.models.trial import Trial
from workers.engine.speculators.self.skip_file import SkipFile
from workers.engine.speculators.self.speculator import skipping
from workers.engine.state.batch import MIN_ROWS, Batch, Feed
from workers.engine.state.rows import AttentionRows
from workers.engine.state.sequence import Sequence
from workers.engine.state.tree import DraftTree

BLOCK = 16


@dataclass(frozen=True, slots=True)
class SublayerCosts:
    """Where the time of a plain step goes: shares of it, and what checking a draft costs."""

    attention: float
    """One attention sublayer."""
    mlp: float
    rest: float
    """Embedding, output matrix and everything that no skip set saves."""
    verify: tuple[float, ...]
    """verify[g]: a pass with g drafted tokens per sequence, by a plain step; verify[0] is 1."""

    def of(self, skip: SkipSet, layers: int) -> float:
        """Time of a draft pass by that of a plain step."""
        kept = self.attention * (layers - len(skip.attention)) + self.mlp * (layers - len(skip.mlp))
        return self.rest + kept


@dataclass(frozen=True, slots=True)
class SelfCalibration:
    """What was found, ready to be written, and how."""

    found: SkipFile
    costs: SublayerCosts
    positions: int
    """Positions of the answers on which acceptance was measured."""
    candidates: int
    """Skip sets that were tried."""


def calibrate_self(
    config: EngineConfig,
    prompts: Seq[Seq[int]],
    *,
    answer_tokens: int = 32,
    temperature: float = 1.0,
    batch: int = 1,
    max_positions: int = 256,
    max_candidates: int = 300,
    costs: SublayerCosts | None = None,
    progress: Progress | None = None,
    model: LoadedModel | None = None,
) -> SelfCalibration:
    """Search the skip set with the largest predicted speedup, for steps of `batch` sequences and drafts of the
    configuration's length at most.

    Acceptance is the overlap of the two distributions at `temperature`, or at 0 how often both have the same best
    token. `costs` are measured unless given; everything else is the same in every run. Raises `UnsupportedModel` for
    models that cannot skip, `InvalidConfig` when the prompts give too little to measure, and what loading raises.
    """
    target = model or load_model(config)
    executor = skipping(target)
    layers = target.facts.cache_shape.num_layers
    rehearsal = _Rehearsal(target, prompts, answer_tokens, max_positions, temperature)
    costs = costs or measure_costs(target, batch, config.speculation.depth)

    def judge(skip: SkipSet) -> Judged:
        acceptance, cost = rehearsal.acceptance(executor, skip), costs.of(skip, layers)
        return Judged(skip, acceptance, cost, *best_length(acceptance, cost, costs.verify))

    search = SkipSearch(judge, layers, max_candidates, progress)
    best = search.run()
    found = SkipFile(
        target.name, target.content_hash, best.skip.names, best.acceptance, best.cost, best.length, best.speedup
    )
    return SelfCalibration(found, costs, rehearsal.positions, len(search.judged))


@torch.inference_mode()
def measure_costs(target: LoadedModel, batch: int, max_draft_tokens: int, *, repeats: int = 5) -> SublayerCosts:
    """Fastest of some passes over `batch` short sequences, whole and without one kind of sublayer or both."""
    executor, layers = skipping(target), target.facts.cache_shape.num_layers
    every = frozenset(range(layers))
    trial = Trial(target.executor, num_blocks=batch * (2 + max_draft_tokens // BLOCK + 1), block_size=BLOCK)
    seqs = [trial.open([1] * BLOCK, room=max_draft_tokens) for _ in range(batch)]
    trial.run([Feed(seq, 0, BLOCK - 1, logits=False) for seq in seqs])

    def timed(skip: SkipSet, drafted: int = 0) -> float:
        tree = DraftTree.chain([1] * drafted)
        packed = Batch.pack([Feed(seq, BLOCK - 1, BLOCK, tree) for seq in seqs], trial.cache)
        executor.forward_skipping(packed, trial.cache, skip)
        fastest = float("inf")
        for _ in range(repeats):
            started = time.perf_counter()
            executor.forward_skipping(packed, trial.cache, skip)
            fastest = min(fastest, time.perf_counter() - started)
        return fastest

    whole = timed(NOTHING)
    attention = max(0.0, whole - timed(SkipSet(attention=every))) / whole / layers
    mlp = max(0.0, whole - timed(SkipSet(mlp=every))) / whole / layers
    checks = [max(1.0, timed(NOTHING, drafted) / whole) for drafted in range(1, max_draft_tokens + 1)]
    verify = (1.0, *np.maximum.accumulate(checks).tolist())
    return SublayerCosts(attention, mlp, max(0.0, 1.0 - layers * (attention + mlp)), verify)


class _Rehearsal:
    """The target's greedy answers, and one packed pass over their positions."""

    @torch.inference_mode()
    def __init__(
        self, target: LoadedModel, prompts: Seq[Seq[int]], answer_tokens: int, max_positions: int, temperature: float
    ) -> None:
        limit = target.facts.max_model_len - answer_tokens
        usable = [list(prompt)[:limit] for prompt in prompts if len(prompt) > 0]
        blocks = sum((len(prompt) + answer_tokens) // BLOCK + 1 for prompt in usable) + max_positions // BLOCK + 2
        self._trial = Trial(target.executor, num_blocks=blocks, block_size=BLOCK)
        self._temperature = temperature
        seqs = [self._trial.open(prompt, room=answer_tokens) for prompt in usable]
        self._answer(seqs, answer_tokens, target.tokenizer.eos_token_ids)
        places = [(seq, position) for seq in seqs for position in range(seq.num_prompt - 1, len(seq) - 1)]
        places = [places[i] for i in np.unique(np.linspace(0, len(places) - 1, max_positions).astype(int))]
        self.positions = len(places)
        if self.positions < max(MIN_ROWS, 16):
            raise InvalidConfig(
                f"{len(usable)} prompts gave {self.positions} positions to measure acceptance on: take more prompts"
            )
        self._batch = self._pack(places)
        logits = target.executor.forward(self._batch, self._trial.cache).logits[: self.positions]
        self._expected = self._judge(logits)

    def _answer(self, seqs: Seq[Sequence], count: int, ends: frozenset[int]) -> None:
        for seq in seqs:
            self._trial.run([Feed(seq, 0, len(seq) - 1, logits=False)])
        going = list(seqs)
        for _ in range(count if going else 0):
            rows = self._trial.run([Feed(seq, len(seq) - 1, len(seq)) for seq in going])
            for seq, logits in zip(going, rows, strict=True):
                seq.tokens.append(int(logits[-1].argmax()))
            going = [seq for seq in going if seq.tokens[-1] not in ends]
            if not going:
                return

    def _pack(self, places: Seq[tuple[Sequence, int]]) -> Batch:
        """Each position reads the text before it and writes its own key aside."""
        cache = self._trial.cache
        aside = self._trial.open([0], room=len(places))
        slots = [cache.slot(aside, index) for index in range(len(places))]
        seqs = list(dict.fromkeys(seq for seq, _ in places))
        index = {seq: row for row, seq in enumerate(seqs)}
        tables = np.zeros((len(seqs), max(len(cache.block_table(seq)) for seq in seqs)), np.int32)
        for row, seq in enumerate(seqs):
            tables[row, : len(cache.block_table(seq))] = cache.block_table(seq)
        rows = AttentionRows(
            sequence=np.array([index[seq] for seq, _ in places], np.int32),
            prefix_lens=np.array([position for _, position in places], np.int32),
            tail_indptr=np.arange(len(places) + 1, dtype=np.int32),
            tail_slots=np.array(slots, np.int32),
            block_tables=tables,
            block_size=cache.block_size,
        )
        device = cache.shape.device
        return Batch(
            input_ids=torch.tensor([seq.tokens[position] for seq, position in places], device=device),
            positions=torch.tensor([position for _, position in places], device=device),
            slots=torch.tensor(slots, device=device),
            rows=rows,
            logits_rows=torch.arange(len(places), device=device),
            logits_offsets=(0,),
            num_rows=len(places),
        )

    @torch.inference_mode()
    def acceptance(self, executor: SkippingExecutor, skip: SkipSet) -> float:
        logits = executor.forward_skipping(self._batch, self._trial.cache, skip).logits[: self.positions]
        found = self._judge(logits)
        if self._temperature == 0.0:
            return float((found == self._expected).double().mean())
        return float(torch.minimum(found, self._expected).sum(-1).double().mean())

    def _judge(self, logits: torch.Tensor) -> torch.Tensor:
        """[R] best tokens at temperature 0, else [R, V] probabilities."""
        return logits.argmax(-1) if self._temperature == 0.0 else (logits.float() / self._temperature).softmax(-1)
