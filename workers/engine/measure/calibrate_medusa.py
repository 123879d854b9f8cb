"""Fit speculators to a target and to the user's own prompts, once, ahead of a job."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from statistics import median

import torch

from workers.engine.api.config import MAX_TREE_WIDTH, EngineConfig, SpeculationConfig
from workers.engine.api.errors import InvalidConfig
from workers.engine.api.request import Request
from workers.engine.api.sampling_params import SamplingParams
from workers.engine.core import EngineCore
from workers.engine.models.executor import Executor, LoadedModel
from workers.engine.models.layers.precision import choose_precision
from workers.engine.models.trial import Trial
from workers.engine.speculators.medusa.heads import MedusaHeads
from workers.engine.speculators.medusa.tree import TREE_FILE, CalibratedTree, calibrate_tree, fastest_size, write_tree
from workers.engine.speculators.none import NoSpeculator
from workers.engine.speculators.shared.checkpoint import open_draft
from workers.engine.speculators.speculator import SpeculatorContext
from workers.engine.state.batch import Feed
from workers.engine.state.kv_cache import FINAL
from workers.engine.state.tree import ROOT, DraftTree
from workers.engine.verifier import Verdict

__all__ = ["TREE_FILE", "calibrate_medusa", "rank_tuples", "step_seconds"]

TREE_SIZES = (4, 8, 12, 16, 24, 32, 48, 64)
"""Nodes of the trees whose verification is timed."""
_CONTEXT = 64
"""Tokens behind each tree while it is timed."""


def calibrate_medusa(
    config: EngineConfig,
    prompts: Iterable[Seq[int]],
    *,
    max_tokens: int = 128,
    max_nodes: int = 64,
    seconds: Mapping[int, float] | None = None,
    batch: int | None = None,
    model: LoadedModel | None = None,
) -> CalibratedTree:
    """Find the tree that suits the heads `config.speculation.draft` and these prompts, and store it beside the heads.

    The target continues every prompt greedily by up to `max_tokens` tokens. `seconds` gives the time of a step by the
    nodes of its trees and decides how many nodes are worth their time; by default it is measured here, on this machine,
    for `batch` sequences at a time (default: max_batch). Prompts are token ids.

    Raises `InvalidConfig` when there is no draft, a prompt cannot run, or there is nothing to learn from; and what
    `MedusaHeads.load` raises.
    """
    if config.speculation.method != "medusa" or config.speculation.draft is None:
        raise InvalidConfig("calibrating medusa needs method medusa and its heads as draft")
    files = open_draft(config.speculation.draft)
    recorders: list[_RankRecorder] = []

    def make(context: SpeculatorContext) -> dict[str, NoSpeculator]:
        shape, vocab = context.cache.shape, context.target.facts.vocab_size
        precision = choose_precision(config.speculation, shape.dtype, shape.device)
        heads = MedusaHeads.load(files, shape.hidden_size, vocab, precision)
        recorders.append(_RankRecorder(heads, context))
        return {"none": recorders[0]}

    core = EngineCore(replace(config, speculation=SpeculationConfig()), model=model, make=make)
    _run(core, prompts, max_tokens)
    tree = calibrate_tree(recorders[0].answers, max_nodes)
    if not tree.paths:
        raise InvalidConfig(f"{files.name}: the heads were never right on these prompts, or there were none")
    if seconds is None:
        seconds = step_seconds(core.model.executor, batch or config.max_batch, len(tree.paths))
    tree = fastest_size(tree, seconds)
    write_tree(files.path, tree)
    return tree


def _run(core: EngineCore, prompts: Iterable[Seq[int]], max_tokens: int) -> None:
    for index, prompt in enumerate(prompts):
        room = max(1, core.max_model_len - len(prompt))
        params = SamplingParams(max_tokens=min(max_tokens, room), temperature=0.0)
        refused = core.add(Request(index, tuple(prompt), params))
        if refused is not None:
            raise InvalidConfig(f"prompt {index} of the calibration cannot run: {refused.error_message}")
    while core.has_work:
        core.step()


class _RankRecorder(NoSpeculator):
    """Proposes nothing, and asks the heads about every finished sequence."""

    hidden_layers = (FINAL,)

    def __init__(self, heads: MedusaHeads, context: SpeculatorContext) -> None:
        self.answers: list[list[tuple[int, ...]]] = []
        self._heads = heads
        self._cache = context.cache

    def update(self, verdicts: Seq[Verdict]) -> None:
        for verdict in verdicts:
            seq = verdict.seq
            if seq.finished:
                # From the state which the first emitted token was drawn from, on to the last one with a token to guess.
                positions = range(seq.num_prompt - 1, len(seq) - 2)
                hidden = self._cache.hidden[FINAL][[self._cache.slot(seq, position) for position in positions]]
                self.answers.append(rank_tuples(self._heads, hidden, seq.tokens[seq.num_prompt + 1 :]))


@torch.inference_mode()
def rank_tuples(heads: MedusaHeads, hidden: torch.Tensor, following: Seq[int]) -> list[tuple[int, ...]]:
    """Where the tokens that followed stand in the heads' lists, until one is too far down to be drafted.

    `hidden` is [P, N]; head k is asked at row i for following[i + k].
    """
    tokens = torch.tensor(following, device=hidden.device)
    ranks: list[list[int]] = []
    for head in range(len(heads)):
        count = len(following) - head
        if count <= 0:
            break
        logits = heads.logits(head, hidden[:count])
        scores = logits.gather(1, tokens[head : head + count, None])
        ranks.append((logits > scores).sum(1).tolist())
    return [_until_lost([head[row] for head in ranks if row < len(head)]) for row in range(len(hidden))]


def _until_lost(ranks: Seq[int]) -> tuple[int, ...]:
    lost = next((depth for depth, rank in enumerate(ranks) if rank >= MAX_TREE_WIDTH), len(ranks))
    return tuple(ranks[:lost])


def step_seconds(executor: Executor, batch: int, max_nodes: int, *, repeats: int = 3) -> dict[int, float]:
    """Median time of a pass that verifies trees of so many nodes, for `batch` sequences: nodes -> seconds."""
    sizes = [size for size in TREE_SIZES if size <= max_nodes] or [max_nodes]
    room = -(-(_CONTEXT + max(sizes)) // 16)
    trial = Trial(executor, num_blocks=batch * room)
    length = min(_CONTEXT, executor.facts.max_model_len - max(sizes))
    seqs = [trial.open([1 + index % 7] * length, room=max(sizes)) for index in range(batch)]
    trial.run([Feed(seq, 0, length - 1, logits=False) for seq in seqs])
    found = {}
    for size in sizes:
        tree = DraftTree(tuple(range(size)), (ROOT,) * size)
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            trial.run([Feed(seq, length - 1, length, tree) for seq in seqs])
            times.append(time.perf_counter() - started)
        found[size] = median(times)
    return found
