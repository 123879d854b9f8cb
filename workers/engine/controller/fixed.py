"""Policy `fixed`: the same length, always."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from workers.engine.api.config import SpeculationConfig
from workers.engine.controller.controller import StepCost, room
from workers.engine.state.sequence import Sequence
from workers.engine.verifier import Verdict


class FixedController:
    """Always plans `max_draft_tokens` levels, or as many as a sequence has room for. Nothing is measured."""

    def __init__(self, config: SpeculationConfig) -> None:
        self._length = config.depth

    def plan(self, seqs: Seq[Sequence]) -> list[int]:
        return [room(seq, self._length) for seq in seqs]

    def observe(self, verdict: Verdict) -> None:
        pass

    def timed(self, cost: StepCost) -> None:
        pass

    def release(self, seq: Sequence) -> None:
        pass
