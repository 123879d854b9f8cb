"""Local search for the skip set with the largest speedup; deterministic for a deterministic judge."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from workers.engine.models.skipping import ATTENTION, MLP, NOTHING, SkipSet

TRIES = 4
"""Most promising sublayers that are tried at each step."""
PATIENCE = 12
"""Sublayers skipped in a row without a gain until the search turns to something else."""
HOPELESS = 0.1
"""Acceptance below which skipping more is not worth trying."""

Progress = Callable[[int, float], None]
"""Told after every candidate: how many were tried, and the best predicted speedup so far."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A skip set and what it promises."""

    skip: SkipSet
    acceptance: float
    cost: float
    length: int
    """Draft length with the largest speedup."""
    speedup: float


class SkipSearch:
    """Skip one more, as long as it may lead somewhere; early exits; then exchange and put back."""

    def __init__(
        self, judge: Callable[[SkipSet], Judged], layers: int, budget: int, progress: Progress | None = None
    ) -> None:
        self.judged: dict[SkipSet, Judged] = {}
        self._judge = judge
        self._layers = layers
        self._budget = budget
        self._progress = progress
        self._best: Judged | None = None

    def run(self) -> Judged:
        names = [f"{kind}.{layer}" for kind in (ATTENTION, MLP) for layer in range(self._layers)]
        alone = {name: self._try(NOTHING.flip(name)) for name in names}
        loss = {name: 1.0 - judged.acceptance if judged else 1.0 for name, judged in alone.items()}
        order = sorted(names, key=lambda name: (loss[name], names.index(name)))
        self._skip_more(order)
        for layer in range(1, self._layers):
            self._try(SkipSet.leave_at(layer, self._layers))
        while self._exchange(order):
            pass
        assert self._best is not None
        return self._best

    def _try(self, skip: SkipSet) -> Judged | None:
        """None when the budget is used up."""
        if skip not in self.judged:
            if len(self.judged) >= self._budget:
                return None
            judged = self.judged[skip] = self._judge(skip)
            if self._best is None or judged.speedup > self._best.speedup:
                self._best = judged
            if self._progress:
                self._progress(len(self.judged), self._best.speedup)
        return self.judged[skip]

    def _skip_more(self, order: Seq[str]) -> None:
        current, left, idle, best = NOTHING, list(order), 0, 0.0
        while left and idle < PATIENCE:
            tried = [(self._try(current.flip(name)), name) for name in left[:TRIES]]
            judged = [(one, name) for one, name in tried if one is not None]
            if not judged:
                return
            chosen, name = max(judged, key=lambda pair: (pair[0].speedup, -left.index(pair[1])))
            if chosen.acceptance < HOPELESS:
                return
            current, left = chosen.skip, [other for other in left if other != name]
            idle = 0 if chosen.speedup > best else idle + 1
            best = max(best, chosen.speedup)

    def _exchange(self, order: Seq[str]) -> bool:
        """Take the first change for the better: keep one that is skipped, with or without skipping another."""
        assert self._best is not None
        start = self._best
        others = [name for name in order if name not in start.skip.names][:TRIES]
        for name in sorted(start.skip.names, key=order.index, reverse=True):
            kept = start.skip.flip(name)
            for candidate in (kept, *(kept.flip(other) for other in others)):
                judged = self._try(candidate) if len(candidate) else None
                if judged is not None and judged.speedup > start.speedup:
                    return True
        for other in others:
            judged = self._try(start.skip.flip(other))
            if judged is not None and judged.speedup > start.speedup:
                return True
        return False
