"""Whole outputs, step after step, with the real noise and the real drafting code: what one step cannot show.

Target and draft are Markov chains over a few tokens, so the law of an output is a product of table rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tests.support.verifier.gtest import ALPHA, p_value
from workers.engine import Request, SamplingParams
from workers.engine.api.tree_shape import TreeShape
from workers.engine.speculators.shared.drawing import DraftNoise
from workers.engine.speculators.shared.growth import TreeGrowth, extend_all
from workers.engine.state.batch import Feed
from workers.engine.state.sequence import Sequence
from workers.engine.state.tree import DraftTree
from workers.engine.verifier import BlockVerifier, CoupledVerifier, RejectionVerifier, Verifier
from workers.engine.verifier.noise import PhiloxNoise, Place
from workers.engine.verifier.rules import choose

Propose = Callable[[list[Sequence]], list[DraftTree]]
CHAIN = TreeShape()


@dataclass(frozen=True)
class World:
    """Row t of a table: what comes after token t. Outputs have `length` tokens, after a prompt of token 0."""

    target: list[list[float]]
    draft: list[list[float]]
    length: int

    @property
    def law(self) -> dict[tuple[int, ...], float]:
        paths = itertools.product(range(len(self.target)), repeat=self.length)
        return {path: float(np.prod([self.target[a][b] for a, b in itertools.pairwise((0, *path))])) for path in paths}

    def outputs(self, verifier: Verifier, propose: Propose, count: int) -> list[tuple[int, ...]]:
        logits = torch.tensor(self.target).log()
        params = [SamplingParams(temperature=1.0, max_tokens=self.length, seed=seed) for seed in range(count)]
        seqs = [Sequence(Request(seed, [0], p), seed, frozenset(), 100) for seed, p in enumerate(params)]
        while running := [seq for seq in seqs if not seq.finished]:
            feeds, last, offsets = [], [], []
            for seq, tree in zip(running, propose(running), strict=True):
                feeds.append(Feed(seq, len(seq) - 1, len(seq), tree))
                offsets.append(len(last))
                last.extend((seq.tokens[-1], *tree.tokens))
            verifier.verify(feeds, logits[torch.tensor(last)], offsets)
        return [tuple(seq.output) for seq in seqs]

    def drafts(
        self, length: Callable[[Sequence], int], shape: TreeShape = CHAIN, noise: DraftNoise = DraftNoise.APART
    ) -> Propose:
        """The real drafting code over the draft's table."""
        logits = torch.tensor(self.draft).log()

        def propose(seqs: list[Sequence]) -> list[DraftTree]:
            grown = [TreeGrowth(seq, length(seq), shape, len(self.draft), noise) for seq in seqs]
            while growing := [growth for growth in grown if growth.growing]:
                last = [(g.seq.tokens[-1], *path)[-1] for g in growing for path in g.frontier_paths()]
                extend_all(growing, logits[torch.tensor(last)])
            return [growth.tree() for growth in grown]

        return propose


WORLD = World(
    target=[[0.2, 0.45, 0.35], [0.1, 0.6, 0.3], [0.25, 0.25, 0.5]],
    draft=[[0.7, 0.15, 0.15], [0.4, 0.3, 0.3], [0.1, 0.7, 0.2]],
    length=4,
)
LOPSIDED = World(target=[[0.8, 0.2], [0.02, 0.98]], draft=[[0.33, 0.67], [0.34, 0.66]], length=3)
"""Here wrong keys of block verification show within a thousand outputs."""


def changing(longest: int) -> Callable[[Sequence], int]:
    """A length that changes from step to step and from sequence to sequence, known before anything is drawn."""
    return lambda seq: 1 + (seq.index + len(seq)) % longest


def always(length: int) -> Callable[[Sequence], int]:
    return lambda seq: length


CASES: dict[str, tuple[World, Verifier, Propose]] = {
    "exact": (WORLD, CoupledVerifier(), WORLD.drafts(changing(4), TreeShape(2), DraftNoise.COUPLED)),
    "rejection": (WORLD, RejectionVerifier(), WORLD.drafts(changing(4))),
    "rejection, tree": (WORLD, RejectionVerifier(), WORLD.drafts(changing(3), TreeShape.comb(2, 3))),
    "rejection, paths with gaps": (
        WORLD,
        RejectionVerifier(),
        WORLD.drafts(changing(2), TreeShape(paths=((1,), (2,), (1, 1)))),
    ),
    "block": (WORLD, BlockVerifier(), WORLD.drafts(changing(4))),
    "block, lopsided": (LOPSIDED, BlockVerifier(), LOPSIDED.drafts(always(4))),
}


@pytest.mark.parametrize("case", CASES)
def test_the_law_of_whole_outputs(case: str) -> None:
    world, verifier, propose = CASES[case]
    assert p_value(world.outputs(verifier, propose, 1500), world.law) > ALPHA


@pytest.fixture
def by_position_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Place, "counter", property(lambda place: place.start + place.depth))


@pytest.mark.usefixtures("by_position_only")
def test_wrong_block_with_numbers_that_come_back() -> None:
    outputs = LOPSIDED.outputs(BlockVerifier(), LOPSIDED.drafts(always(4)), 1200)
    assert p_value(outputs, LOPSIDED.law) < ALPHA


@pytest.mark.usefixtures("by_position_only")
def test_rejection_does_not_mind() -> None:
    """Token by token, nothing behind a rejection was looked at: position-only keys would do."""
    outputs = LOPSIDED.outputs(RejectionVerifier(), LOPSIDED.drafts(always(4)), 1200)
    assert p_value(outputs, LOPSIDED.law) > ALPHA


def test_wrong_one_noise_for_draft_and_residual() -> None:
    noise = PhiloxNoise()

    def propose(seqs: list[Sequence]) -> list[DraftTree]:
        q = torch.tensor([WORLD.draft[seq.tokens[-1]] for seq in seqs])
        drawn = choose(q, noise.choose([Place(seq.key, len(seq), 0) for seq in seqs])).tolist()
        return [DraftTree((token,), (-1,), (row,)) for token, row in zip(drawn, q, strict=True)]

    assert p_value(WORLD.outputs(RejectionVerifier(), propose, 1500), WORLD.law) < ALPHA
