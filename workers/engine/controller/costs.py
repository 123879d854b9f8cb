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
"""A size is known when one that is at most this many times larger is: steps get cheaper with fewer rows, and slowly."""
_NEWEST = 0.2
"""Weight of the newest measurement."""
_OUTLIER = 2.0
"""A step that took more than so many times the average counts as so many: the machine did something else."""


@dataclass(slots=True)
class _Average:
    value: float
    size: float
    count: int = 1

    def add(self, value: float, size: float, weight: float) -> None:
        weight = max(weight, 1 / (self.count + 1))
        self.value += weight * (min(value, _OUTLIER * self.value) - self.value)
        self.size += weight * (size - self.size)
        self.count += 1


class SecondsBySize:
    """A table of averages by size, in buckets of a fifth, straight lines between them."""

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
        """Seconds for `sizes`. Outside of what was seen they are on the line from the smallest to the largest, so that
        no size is ruled out unseen; 0 when nothing was seen."""
        if not self._averages:
            return np.zeros_like(sizes)
        x, y, slope = self._line = self._line or self._known()
        beyond = np.maximum(0.0, sizes - x[-1]) - np.maximum(0.0, x[0] - sizes)
        seconds: Floats = np.maximum(np.interp(sizes, x, y) + slope * beyond, y[0] * np.minimum(1.0, sizes / x[0]))
        return seconds

    def _known(self) -> tuple[Floats, Floats, float]:
        x, y = np.array(sorted((average.size, average.value) for average in self._averages.values())).T
        return x, y, max(0.0, (y[-1] - y[0]) / (x[-1] - x[0])) if len(x) > 1 else 0.0


class StepCosts:
    """Seconds of a step: drafting by levels, and the rest by rows that give logits. Prompt rows are told apart."""

    def __init__(self) -> None:
        self._passes = SecondsBySize()
        self._levels = SecondsBySize()
        self._prompt_row = 0.0

    def learn(self, cost: StepCost) -> None:
        if cost.levels:
            self._levels.learn(cost.drafting, cost.draft_seconds / cost.levels)
        if cost.logit_rows == 0:
            return
        prompts = min(self._prompt_row * cost.prompt_rows, cost.other_seconds)
        share = prompts / cost.other_seconds
        if cost.prompt_rows and self.knows(cost.logit_rows):
            rest = float(self._passes.at(np.array([cost.logit_rows], np.float64))[0])
            per_row = max(0.0, cost.other_seconds - rest) / cost.prompt_rows
            self._prompt_row += _NEWEST * (per_row - self._prompt_row)
        if cost.prompt_rows == 0 or share > 0:
            self._passes.learn(cost.logit_rows, cost.other_seconds - prompts, _NEWEST * (1 - share))

    def knows(self, rows: int) -> bool:
        return self._passes.knows(rows)

    def seconds(self, rows: Floats, drafting: int = 0, levels: int = 0) -> Floats:
        """Of steps with so many rows that give logits, of which drafting makes `levels` for so many sequences."""
        draft = levels * self._levels.at(np.array([drafting], np.float64)) if levels else 0.0
        return self._passes.at(rows) + draft


def _bucket(size: int) -> int:
    return round(_BUCKETS_PER_DOUBLING * log2(max(1, size)))
