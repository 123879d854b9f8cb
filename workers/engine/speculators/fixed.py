"""A speculator that proposes what it is told: for tests that force acceptance, rejection and odd trees."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from workers.engine.speculators.speculator import Speculator
from workers.engine.state.sequence import Sequence
from workers.engine.state.tree import EMPTY, DraftTree


class FixedSpeculator(Speculator):
    """`propose_one(seq, length)` gives the tree for one sequence, of at most length * width nodes."""

    name = "fixed"

    def __init__(self, propose_one: Callable[[Sequence, int], DraftTree], width: int = 1) -> None:
        self._width = width
        self._propose_one = propose_one

    def max_nodes(self, length: int) -> int:
        return self._width * length

    def propose(self, seqs: Seq[Sequence], lengths: Seq[int]) -> list[DraftTree]:
        return [
            self._propose_one(seq, length) if length > 0 else EMPTY for seq, length in zip(seqs, lengths, strict=True)
        ]
