"""Medusa: heads on the target's last hidden state guess the next tokens independently of each other, in one go."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch

from workers.engine.api.config import EngineConfig, SpeculationConfig
from workers.engine.api.errors import InvalidConfig, UnsupportedModel
from workers.engine.api.tree_shape import TreeShape
from workers.engine.models.executor import Model
from workers.engine.models.kv_memory import DraftMemory
from workers.engine.models.layers.precision import Precision, Unread, choose_precision
from workers.engine.sampler import RowContext
from workers.engine.speculators.medusa.heads import MedusaHeads
from workers.engine.speculators.medusa.tree import TREE_FILE, read_tree
from workers.engine.speculators.shared.checkpoint import open_draft
from workers.engine.speculators.shared.drawing import DraftNoise, draft_noise_of, draw_candidates
from workers.engine.speculators.shared.features import require_features
from workers.engine.speculators.shared.growth import TreeGrowth
from workers.engine.speculators.speculator import LoadedDraft, Speculator, SpeculatorContext
from workers.engine.state.kv_cache import FINAL, KVCache
from workers.engine.state.sequence import Sequence
from workers.engine.state.tree import EMPTY, DraftTree
from workers.engine.verifier import Verdict


class MedusaSpeculator(Speculator):
    """Keeps nothing per sequence but the knowledge that its hidden states are there to be read."""

    name = "medusa"
    hidden_layers = (FINAL,)

    def __init__(
        self,
        heads: MedusaHeads,
        target_cache: KVCache,
        *,
        shape: TreeShape,
        target_vocab: int,
        noise: DraftNoise = DraftNoise.COUPLED,
        draft: LoadedDraft | None = None,
    ) -> None:
        self.draft = draft
        self.depth = shape.max_depth or len(heads)
        self._heads = heads
        self._target_cache = target_cache
        self._shape = shape
        self._target_vocab = target_vocab
        self._noise = noise
        self._ready: set[Sequence] = set()
        """Sequences which emitted since they were admitted: the target has been through all of their tokens but one."""

    @classmethod
    def create(cls, context: SpeculatorContext) -> MedusaSpeculator:
        speculation, target = context.config.speculation, context.target.facts
        precision = choose_precision(speculation, target.cache_shape.dtype, target.cache_shape.device)
        heads, shape = _open(speculation, context.target, precision)
        return cls(
            heads,
            context.cache,
            shape=shape,
            target_vocab=target.vocab_size,
            noise=draft_noise_of(speculation),
            draft=LoadedDraft(str(speculation.draft), heads.content_hash, str(precision), heads.weight_bytes),
        )

    @classmethod
    def check(cls, config: EngineConfig, target: Model) -> DraftMemory:
        shape = target.facts.cache_shape
        choose_precision(config.speculation, shape.dtype, shape.device)
        _open(config.speculation, target, Unread())
        return DraftMemory(cls.hidden_layers)

    @property
    def details(self) -> dict[str, Any]:
        return {"tree": self._shape.described()}

    def max_nodes(self, length: int) -> int:
        return self._shape.max_nodes(length)

    @torch.inference_mode()
    def propose(self, seqs: Seq[Sequence], lengths: Seq[int]) -> list[DraftTree]:
        growths = {
            seq: TreeGrowth(seq, length, self._shape, self._target_vocab, self._noise)
            for seq, length in zip(seqs, lengths, strict=True)
            if length > 0 and seq in self._ready
        }
        row = {seq: index for index, seq in enumerate(growths)}
        hidden = self._features(list(growths))
        level = 0
        while growing := [growth for growth in growths.values() if growth.growing]:
            logits = self._heads.logits(level, hidden[[row[growth.seq] for growth in growing]])
            self._extend(growing, logits)
            level += 1
        return [growths[seq].tree() if seq in growths else EMPTY for seq in seqs]

    def _features(self, seqs: Seq[Sequence]) -> torch.Tensor:
        """[B, N]: what the target knew when it drew the last token."""
        slots = [self._target_cache.slot(seq, len(seq) - 2) for seq in seqs]
        return self._target_cache.hidden[FINAL][slots]

    def _extend(self, growing: Seq[TreeGrowth], logits: torch.Tensor) -> None:
        """Add a level to every tree. A head knows nothing of the path above, so one row serves all nodes of a level."""
        paths = [growth.frontier_paths() for growth in growing]
        contexts = [RowContext(growth.seq, frontier[0]) for growth, frontier in zip(growing, paths, strict=True)]
        count = max(growth.num_children for growth in growing)
        drawn = draw_candidates(logits, contexts, count, self._target_vocab, self._noise)
        for index, (growth, frontier) in enumerate(zip(growing, paths, strict=True)):
            width = len(frontier)
            growth.extend(
                [drawn.tokens[index]] * width, [drawn.scores[index]] * width, [drawn.proposals[index]] * width
            )

    def update(self, verdicts: Seq[Verdict]) -> None:
        self._ready.update(verdict.seq for verdict in verdicts)

    def release(self, seq: Sequence) -> None:
        self._ready.discard(seq)


def _open(speculation: SpeculationConfig, target: Model, precision: Precision) -> tuple[MedusaHeads, TreeShape]:
    """The heads and the tree of their candidates, as deep as there are heads where the options do not say.

    Raises what does not fit the target or the configuration.
    """
    assert speculation.draft is not None
    require_features(target, "medusa")
    files = open_draft(speculation.draft)
    facts = target.facts
    heads = MedusaHeads.load(files, facts.cache_shape.hidden_size, facts.vocab_size, precision)
    _check_depth(speculation, len(heads))
    shape = _shape(speculation.settled(len(heads)), files.path)
    if (shape.max_depth or 0) > len(heads):
        raise UnsupportedModel(
            f"{files.path / TREE_FILE}: the tree is {shape.max_depth} tokens deep, but there are {len(heads)} heads: "
            "calibrate it again for these heads, or remove it"
        )
    return heads, shape


def _check_depth(speculation: SpeculationConfig, num_heads: int) -> None:
    """Every token along a path needs a head; what is not set takes what there is."""
    if speculation.max_draft_tokens is not None:
        asked = f"max_draft_tokens is {speculation.depth}"
    elif speculation.tree_paths:
        asked = f"tree_paths is {speculation.depth} tokens deep"
    else:
        return
    if speculation.depth > num_heads:
        raise InvalidConfig(
            f"{asked}, but {speculation.draft} has {num_heads} heads, one for each token: take {num_heads} or less"
        )


def _shape(speculation: SpeculationConfig, directory: Path) -> TreeShape:
    """What the configuration says, else what was calibrated. Rule block takes chains alone."""
    if speculation.has_tree or speculation.verify == "block":
        return speculation.tree_shape
    return read_tree(directory) or speculation.tree_shape
