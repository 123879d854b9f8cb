"""The interface of controllers, which decide how long drafts are."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from workers.engine.state.sequence import Sequence
from workers.engine.verifier import Verdict


@dataclass(frozen=True, slots=True)
class StepCost:
    """What a step did and how long it took."""

    logit_rows: int
    """Rows of the target's pass that gave logits: a last token for each sequence, and the nodes of its draft."""
    prompt_rows: int
    """Rows of the target's pass that gave no logits."""
    drafting: int
    """Sequences that were asked to draft."""
    levels: int
    """Levels of the longest draft that was asked for; 0: no sequence drafted."""
    draft_seconds: float
    """Time of the drafting."""
    other_seconds: float
    """Time of everything else in the step."""


class Controller(Protocol):
    """Plans draft lengths: levels of the draft, 0 meaning plain decoding. Exactness never depends on it.

    A plan rests on what is known before the step: the rules `rejection` and `block` need that.
    """

    def plan(self, seqs: Seq[Sequence]) -> list[int]:
        """Levels of the draft of each sequence in the coming step, at most `room(seq, ...)`."""
        ...

    def observe(self, verdict: Verdict) -> None:
        """Learn from a step that is verified, with or without a draft."""
        ...

    def timed(self, cost: StepCost) -> None:
        """Learn from what the step took."""
        ...

    def release(self, seq: Sequence) -> None:
        """Forget a finished or aborted sequence."""
        ...


def room(seq: Sequence, longest: int) -> int:
    """Levels that a draft of `seq` may have: the bonus is the last token that may be emitted."""
    return max(0, min(longest, seq.num_remaining - 1))
