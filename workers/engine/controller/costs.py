"""What a step costs, learnt from the steps that ran."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2
from typing import Any

import numpy as np
import numpy.typing as npt

from workers.engine.controller.controller import StepCost

Floats = npt.NDArray[np.floating[Any]]

_BUCKETS_PER_DOUBLING = 4
_NEAR = 2.0
"""A size counts as known if a size up to this many times larger was measured: fewer rows make a step only a little
cheaper."""
_NEWEST = 0.2
"""Weight of the newest measurement."""
_OUTLIER = 2.0
"""A step that took more than this many times the average counts as this many: the machine was busy with something
else."""


@dataclass(slots=True)
class _Average:
    value: float
    size: float
    count: int = 1

    def add(self, value: float, size: float, weight: float) -> None:
        # A plain mean at first: the first measurement would count for too long otherwise.
        weight = max(weight, 1 / (self.count + 1))
        self.value += weight * (min(value, _OUTLIER * self.value) - self.value)
        self.size += weight * (size - self.size)
        self.count += 1


class SecondsBySize:
    """Average seconds by size, in buckets that are about 19 % wide, with straight lines between them."""

    def __init__(self) -> None:
        self._averages: dict[int, _Average] = {}
        self._line: tuple[Floats, Floats, float] | None = None

    def learn(self, size: int, seconds: float, weight: float = _NEWEST) -> None:
        bucket = _bucket(size)
        if bucket in self._averages:
            self._averages[bucket].add(seconds, size, weight)
        else:
            self._averages[bucket] = _Average(seconds, size)
        self._line = None

    def knows(self, size: int) -> bool:
        """Whether this size, or one that is not much larger, was seen more than once."""
        last = _bucket(round(size * _NEAR))
        return any(average.count > 1 and _bucket(size) <= bucket <= last for bucket, average in self._averages.items())

    def at(self, sizes: Floats) -> Floats:
        """Seconds [N] for `sizes` [N]; 0 when nothing was measured.

        Sizes outside of those measured lie on the line through the smallest and the largest, so that none is ruled out
        before it was tried.
        """
        if not self._averages:
            return np.zeros_like(sizes)
        x, y, slope = self._line = self._line or self._known()
        beyond = np.maximum(0.0, sizes - x[-1]) - np.maximum(0.0, x[0] - sizes)
        # Below the smallest size the line may fall too far: a share of its seconds in proportion is the least.
        seconds: Floats = np.maximum(np.interp(sizes, x, y) + slope * beyond, y[0] * np.minimum(1.0, sizes / x[0]))
        return seconds

    def _known(self) -> tuple[Floats, Floats, float]:
        x, y = np.array(sorted((average.size, average.value) for average in self._averages.values())).T
        return x, y, max(0.0, (y[-1] - y[0]) / (x[-1] - x[0])) if len(x) > 1 else 0.0


class StepCosts:
    """Seconds of a step: drafting, by levels and sequences, and the target's pass, by rows that give logits.

    Rows of prompts have a price of their own, which is subtracted before the rest is learnt from.
    """

    def __init__(self) -> None:
        self._passes = SecondsBySize()
        self._levels = SecondsBySize()
        self._prompt_row = 0.0

    def learn(self, cost: StepCost) -> None:
        if cost.levels:
            self._levels.learn(cost.drafting, cost.draft_seconds / cost.levels)
        if cost.logit_rows == 0:
            return
        # Seconds that prompt rows are believed to have taken. The larger their share, the less the rest tells.
        prompts = min(self._prompt_row * cost.prompt_rows, cost.other_seconds)
        share = prompts / cost.other_seconds
        if cost.prompt_rows and self.knows(cost.logit_rows):
            rest = float(self._passes.at(np.array([cost.logit_rows], np.float64))[0])
            per_row = max(0.0, cost.other_seconds - rest) / cost.prompt_rows
            self._prompt_row += _NEWEST * (per_row - self._prompt_row)
        if cost.prompt_rows == 0 or share > 0:  # without a price of prompt rows the rest would contain them
            self._passes.learn(cost.logit_rows, cost.other_seconds - prompts, _NEWEST * (1 - share))

    def knows(self, rows: int) -> bool:
        return self._passes.knows(rows)

    def seconds(self, rows: Floats, drafting: int = 0, levels: int = 0) -> Floats:
        """Seconds [N] of steps: `rows` [N] rows give logits, and `drafting` sequences draft `levels` levels."""
        draft = levels * self._levels.at(np.array([drafting], np.float64)) if levels else 0.0
        return self._passes.at(rows) + draft


def _bucket(size: int) -> int:
    return round(_BUCKETS_PER_DOUBLING * log2(max(1, size)))
