"""Policy `auto`: the drafts that yield most tokens per second, none included.

Each step is planned from what steps took so far and from how often drafts were accepted. TurboSpec (Liu et al.,
arXiv 2406.14066) chooses one length for the batch by its goodput. Here every sequence gets its own: the levels of all
drafts are ranked by their chance to be accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from workers.engine.api.config import SpeculationConfig
from workers.engine.controller.controller import StepCost, room
from workers.engine.controller.costs import Floats, StepCosts
from workers.engine.controller.survival import Survival
from workers.engine.state.sequence import Sequence
from workers.engine.verifier import Verdict

_GAIN_TO_STAY, _GAIN_TO_START = 1.03, 1.06
"""Predicted speed by that of plain decoding from which on drafting goes on, and begins again. The best of many plans is
one whose prediction is likely too good, so a small gain is none."""
_FIRST_PROBE, _LAST_PROBE = 32, 512
"""Steps without drafts until one tries them; doubles while the trial changes nothing."""
_LOOK_EVERY = 8
"""Steps without drafts from one look at whether they would pay to the next."""
_FIRST_PLAIN, _LAST_PLAIN = 4, 128
"""Steps with drafts after which one goes without, so that what plain decoding takes is known as of now; doubles while
drafting goes on."""
_LEAST_SECONDS = 1e-9
"""What a pass takes at least: the line through the times of passes may predict none."""


@dataclass(frozen=True, slots=True)
class _Plan:
    lengths: list[int]
    tokens_per_second: float


class AutoController:
    """Drafts as long as the last level is worth its time, and rests, but for probes, where drafting does not pay.

    nodes(length): rows that a draft of so many levels adds to a pass.
    """

    def __init__(self, config: SpeculationConfig, nodes: Callable[[int], int]) -> None:
        self._config = config
        self._longest = config.depth
        self._rows_per_level = [nodes(length) / length for length in range(1, self._longest + 1)]
        self._costs = StepCosts()
        self._survival = Survival(self._longest)
        self._drafting = True
        self._since_plain = 0
        self._since_drafts = 0
        self._probe_every = _FIRST_PROBE
        self._plain_every = _FIRST_PLAIN
        self._asked: set[Sequence] = set()

    def plan(self, seqs: Seq[Sequence]) -> list[int]:
        lengths = self._plan(seqs)
        self._asked = {seq for seq, length in zip(seqs, lengths, strict=True) if length}
        return lengths

    def _plan(self, seqs: Seq[Sequence]) -> list[int]:
        nothing = [0] * len(seqs)
        if not self._costs.knows(len(seqs)):
            return nothing
        if self._since_plain >= self._plain_every:
            self._plain_every = min(2 * self._plain_every, _LAST_PLAIN)
            return nothing
        if not self._drafting and self._since_drafts % _LOOK_EVERY:
            return nothing
        rooms = [room(seq, self._longest) if self._may_draft(seq) else 0 for seq in seqs]
        drafts = self._best(rooms, *self._survival.of(seqs))
        if drafts is None:
            return nothing
        plain = len(seqs) / max(self._costs.seconds(np.array([len(seqs)], np.float64))[0], _LEAST_SECONDS)
        if drafts.tokens_per_second > plain * (_GAIN_TO_STAY if self._drafting else _GAIN_TO_START):
            self._drafting = True
            return drafts.lengths
        self._drafting, self._plain_every = False, _FIRST_PLAIN
        if self._since_drafts < self._probe_every:
            return nothing
        self._probe_every = min(2 * self._probe_every, _LAST_PROBE)
        return drafts.lengths

    def _may_draft(self, seq: Sequence) -> bool:
        return (seq.request.method or self._config.method) != "none"

    def _best(self, rooms: Seq[int], offered: Floats, survival: Floats) -> _Plan | None:
        """The best plan in which somebody drafts.

        A row is worth the chance that its level is accepted; in that order, no level comes before the one above it. So
        for each depth, the depth being what drafting costs, the best plan is one of the beginnings of that order. A
        draft that a lookup does not find brings no token, but no row either.
        """
        levels = np.arange(self._longest)
        chances = np.where(levels < np.array(rooms)[:, None], survival, 0.0)
        best = None
        for depth in range(1, max(rooms, default=0) + 1):
            flat = chances[:, :depth].ravel()
            order = np.argsort(-flat, kind="stable")
            order = order[: np.count_nonzero(flat)]
            found = offered[order // depth]
            rows = len(rooms) + self._rows_per_level[depth - 1] * np.cumsum(found)
            seconds = self._costs.seconds(rows, len(rooms), depth)
            speeds = (len(rooms) + np.cumsum(found * flat[order])) / np.maximum(seconds, _LEAST_SECONDS)
            end = int(np.argmax(speeds))
            if best is None or speeds[end] > best.tokens_per_second:
                lengths = np.bincount(order[: end + 1] // depth, minlength=len(rooms))
                best = _Plan(lengths.tolist(), float(speeds[end]))
        return best

    def observe(self, verdict: Verdict) -> None:
        self._survival.learn(verdict, verdict.seq in self._asked)

    def timed(self, cost: StepCost) -> None:
        self._costs.learn(cost)
        if cost.logit_rows:
            if self._since_plain >= _FIRST_PROBE:
                self._probe_every = _FIRST_PROBE
            self._since_plain = self._since_plain + 1 if cost.levels else 0
            self._since_drafts = 0 if cost.levels else self._since_drafts + 1

    def release(self, seq: Sequence) -> None:
        self._survival.release(seq)
