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
"""Predicted speed, divided by that of plain decoding, above which drafting continues or starts again. The best of many
plans is likely to be one whose prediction is too good, so a small gain does not count."""
_FIRST_PROBE, _LAST_PROBE = 32, 512
"""Steps without drafts before a step tries them; doubles while the trial changes nothing."""
_LOOK_EVERY = 8
"""While nothing is drafted, every 8th step asks whether drafts would help now."""
_FIRST_PLAIN, _LAST_PLAIN = 4, 128
"""Steps with drafts before a plain one, which keeps the measured time of plain decoding up to date; doubles while
drafting continues."""
_LEAST_SECONDS = 1e-9
"""What a pass takes at least: the line through the times of passes may predict none."""


@dataclass(frozen=True, slots=True)
class _Plan:
    lengths: list[int]
    tokens_per_second: float


class AutoController:
    """Makes drafts as long as their last level is worth its time, and none, except for probes, where they do not help.

    nodes(length): rows that a draft of `length` levels adds to a pass.
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
            # There is no time of a plain step to compare drafts with: measure it first.
            return nothing
        if self._since_plain >= self._plain_every:
            # One plain step, to have its time as of now; more seldom the longer drafting goes on.
            self._plain_every = min(2 * self._plain_every, _LAST_PLAIN)
            return nothing
        if not self._drafting and self._since_drafts % _LOOK_EVERY:
            # Planning takes time itself, and what it finds seldom changes from one step to the next.
            return nothing
        rooms = [room(seq, self._longest) if self._may_draft(seq) else 0 for seq in seqs]
        drafts = self._best(rooms, *self._survival.of(seqs))
        if drafts is None:
            return nothing
        # Tokens per second of plain decoding: a step yields one token for each sequence.
        plain = len(seqs) / max(self._costs.seconds(np.array([len(seqs)], np.float64))[0], _LEAST_SECONDS)
        if drafts.tokens_per_second > plain * (_GAIN_TO_STAY if self._drafting else _GAIN_TO_START):
            self._drafting = True
            return drafts.lengths
        self._drafting, self._plain_every = False, _FIRST_PLAIN
        # Acceptance is learnt from drafts alone, so even now one is tried from time to time.
        if self._since_drafts < self._probe_every:
            return nothing
        self._probe_every = min(2 * self._probe_every, _LAST_PROBE)
        return drafts.lengths

    def _may_draft(self, seq: Sequence) -> bool:
        return (seq.request.method or self._config.method) != "none"

    def _best(self, rooms: Seq[int], offered: Floats, survival: Floats) -> _Plan | None:
        """The plan with the most tokens per second, among those in which at least one sequence drafts.

        rooms: levels that each sequence may have; offered [B], survival [B, levels]: see `Survival.of`. Drafting time
        depends on the depth of the longest draft. For each depth the levels of all drafts are sorted by their chance to
        be accepted, and the best plan is one of the beginnings of that order. A draft that a lookup does not find adds
        neither tokens nor rows. None: no sequence may draft.
        """
        levels = np.arange(self._longest)
        # [B, levels]; levels for which a sequence has no room left get chance 0 and are cut off below.
        chances = np.where(levels < np.array(rooms)[:, None], survival, 0.0)
        best = None
        for depth in range(1, max(rooms, default=0) + 1):
            # Index i of `flat` is level i % depth of sequence i // depth. Chances never rise along a draft and the sort
            # is stable, so that a level comes after the one above it.
            flat = chances[:, :depth].ravel()
            order = np.argsort(-flat, kind="stable")
            order = order[: np.count_nonzero(flat)]
            found = offered[order // depth]
            # Element n of these: the plan that takes the first n + 1 levels of that order.
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
                # Drafting has paid for a while: should it stop paying, probe again soon.
                self._probe_every = _FIRST_PROBE
            self._since_plain = self._since_plain + 1 if cost.levels else 0
            self._since_drafts = 0 if cost.levels else self._since_drafts + 1

    def release(self, seq: Sequence) -> None:
        self._survival.release(seq)
