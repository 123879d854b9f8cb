"""Statistics in integers, counted while emitting: acceptance of one request, and totals of an engine."""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(slots=True)
class AcceptanceStats:
    """What speculation did for one request.

    Always: emitted = steps + accepted; accepted + trimmed <= drafted; sum(histogram) = steps.
    `reached[d]` counts the steps in which a draft token at depth d+1 was put before the verifier and everything
    above it was accepted, so accepted[d] / reached[d] is the conditional acceptance at that depth.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    trimmed: int = 0
    histogram: list[int] = field(default_factory=list)
    """histogram[k]: steps that accepted exactly k draft tokens."""
    reached_per_depth: list[int] = field(default_factory=list)
    accepted_per_depth: list[int] = field(default_factory=list)

    @property
    def emitted(self) -> int:
        return self.steps + self.accepted

    def count_step(self, *, drafted: int, accepted: int, trimmed: int, reached: int) -> None:
        """Count one emitting step: `accepted` draft tokens before the bonus, `reached` depths put to the test."""
        self.steps += 1
        self.drafted += drafted
        self.accepted += accepted
        self.trimmed += trimmed
        _increment(self.histogram, accepted)
        for depth in range(reached):
            _increment(self.reached_per_depth, depth)
        for depth in range(accepted):
            _increment(self.accepted_per_depth, depth)


def _increment(counts: list[int], index: int) -> None:
    if index >= len(counts):
        counts.extend([0] * (index + 1 - len(counts)))
    counts[index] += 1


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """Load of an engine at one moment, and its totals since it started, counted at every step.

    The totals hold what requests that still run have emitted, and what aborted and failed ones had before they ended:
    the sums over the completions' `stats`, and whatever the failed ones lost (a failed completion has no statistics).
    """

    running: int = 0
    waiting: int = 0
    kv_used: int = 0
    kv_blocks: int = 0
    preemptions: int = 0
    finished: int = 0
    """Requests that ended with an answer, aborted ones too."""
    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def emitted(self) -> int:
        return self.steps + self.accepted

    def plus(self, *, finished: int = 0, steps: int = 0, drafted: int = 0, accepted: int = 0) -> EngineSnapshot:
        """Totals with these added: a new object, so that another thread never sees half of a step."""
        return replace(
            self,
            finished=self.finished + finished,
            steps=self.steps + steps,
            drafted=self.drafted + drafted,
            accepted=self.accepted + accepted,
        )


@dataclass(slots=True)
class StepProfile:
    """Seconds spent in each part of a step, summed over steps: where the milliseconds go."""

    steps: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    _draft: float = 0.0

    def add(self, part: str, seconds: float) -> None:
        self.seconds[part] = self.seconds.get(part, 0.0) + seconds
        if part == "draft":
            self._draft += seconds

    def finish_step(self) -> float:
        """Seconds of this step spent drafting."""
        draft, self._draft = self._draft, 0.0
        self.steps += 1
        return draft
