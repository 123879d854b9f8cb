"""Plain decoding, as a speculator that proposes nothing."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from workers.engine.speculators.speculator import Speculator, SpeculatorContext
from workers.engine.state.sequence import Sequence
from workers.engine.state.tree import EMPTY, DraftTree


class NoSpeculator(Speculator):
    name = "none"

    @classmethod
    def create(cls, context: SpeculatorContext) -> NoSpeculator:
        return cls()

    def max_nodes(self, length: int) -> int:
        return 0

    def propose(self, seqs: Seq[Sequence], lengths: Seq[int]) -> list[DraftTree]:
        return [EMPTY] * len(seqs)
