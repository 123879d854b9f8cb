"""How often drafts were right, counted over prompts, and how far these counts can be trusted."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import sqrt

from workers.engine.api.stats import AcceptanceStats

_DEVIATIONS = 1.959964
"""Of the normal distribution, to either side: 95 % lie between."""


@dataclass(frozen=True, slots=True)
class AcceptanceCounts:
    """What speculation did for some prompts, each counted once. Tuples are by depth of the draft."""

    prompts: int
    output_tokens: int
    steps: int
    """Those without a draft included."""
    drafted: int
    reached: tuple[int, ...]
    """Steps in which a token at this depth was put to the test, the ones above it being accepted."""
    accepted: tuple[int, ...]
    intervals: tuple[tuple[float, float], ...]
    """95 % intervals of `acceptance`."""

    @classmethod
    def of(cls, stats: Seq[AcceptanceStats]) -> AcceptanceCounts:
        """The sum over prompts."""
        depths = range(max((len(one.reached_per_depth) for one in stats), default=0))
        counts = [[(_at(one.accepted_per_depth, d), _at(one.reached_per_depth, d)) for one in stats] for d in depths]
        return cls(
            prompts=len(stats),
            output_tokens=sum(one.emitted for one in stats),
            steps=sum(one.steps for one in stats),
            drafted=sum(one.drafted for one in stats),
            reached=tuple(sum(reached for _, reached in of_depth) for of_depth in counts),
            accepted=tuple(sum(accepted for accepted, _ in of_depth) for of_depth in counts),
            intervals=tuple(rate_interval(of_depth) for of_depth in counts),
        )

    @property
    def tested(self) -> int:
        """Steps in which a draft was put to the test."""
        return self.reached[0] if self.reached else 0

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Conditional acceptance by depth, of the steps that reached it."""
        return tuple(a / r if r else 0.0 for a, r in zip(self.accepted, self.reached, strict=True))

    @property
    def survival(self) -> tuple[float, ...]:
        """Share of all steps, with a draft or without, that accepted a token at this depth."""
        return tuple(accepted / self.steps for accepted in self.accepted)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per step, which is 1 + the sum of `survival`."""
        return self.output_tokens / max(1, self.steps)


def rate_interval(counts: Seq[tuple[int, int]]) -> tuple[float, float]:
    """95 % interval of the rate of successes, from (successes, trials) of every prompt; (0, 1) without trials.

    Wilson's score interval. Trials of one prompt resemble each other: where prompts differ by more than chance, the
    trials count as the fewer independent ones that would vary as much (the design effect; Korn and Graubard 1998). How
    prompts differ, a single one cannot tell: its interval is about its own steps.
    """
    successes, trials = sum(pair[0] for pair in counts), sum(pair[1] for pair in counts)
    if trials == 0:
        return 0.0, 1.0
    rate = successes / trials
    return _wilson(rate, trials / max(1.0, _design_effect(counts, rate, trials)))


def _design_effect(counts: Seq[tuple[int, int]], rate: float, trials: int) -> float:
    """Variance of the rate between prompts, by that of independent trials."""
    groups = [pair for pair in counts if pair[1]]
    chance = rate * (1 - rate) * trials
    if len(groups) < 2 or chance == 0:
        return 1.0
    between = sum((successes - rate * n) ** 2 for successes, n in groups) * len(groups) / (len(groups) - 1)
    return between / chance


def _wilson(rate: float, trials: float) -> tuple[float, float]:
    square = _DEVIATIONS**2 / trials
    middle = (rate + square / 2) / (1 + square)
    reach = sqrt(square * (rate * (1 - rate) + square / 4)) / (1 + square)
    return max(0.0, middle - reach), min(1.0, middle + reach)


def _at(counts: Seq[int], depth: int) -> int:
    return counts[depth] if depth < len(counts) else 0
