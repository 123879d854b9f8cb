"""How likely drafts are to be offered, and their levels to be accepted, learnt from the steps that asked for drafts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Seq

import numpy as np

from workers.engine.controller.costs import Floats
from workers.engine.state.sequence import Sequence
from workers.engine.verifier import Verdict

_FORGETTING, _FORGETTING_OF_METHOD = 0.98, 0.998
"""Share of their weight that counts keep in each step: those of a sequence, and those of its method."""
_TYPICAL = 16
"""Only the first 16 drafts of a sequence count for its method: sequences with good drafts draft most, and would make
the method look too good to new sequences."""
_PRIOR_WEIGHT = 8.0
"""Trials that a prior counts for."""
_FIRST_GUESS = 0.6


class _Counts:
    """Successes and trials, [2, 1 + levels], the older ones counting less.

    Trial 0 asks for a draft, and succeeds if there is one (a lookup may find none). Trial k tests level k of a draft.
    """

    def __init__(self, levels: int, forgetting: float) -> None:
        self._counts: Floats = np.zeros((2, 1 + levels))
        self._forgetting = forgetting
        self._steps = 0
        """Steps since the counts were last brought up to date: a step without a draft costs no arithmetic."""
        self.asked = 0

    def add(self, verdict: Verdict, asked: bool) -> None:
        self._steps += 1
        if asked:
            successes, trials = self.counts
            # Only levels whose parents were accepted were tested: the path, and the level that was rejected.
            trials[: 1 + verdict.reached] += 1
            successes[: len(verdict.path) + (verdict.reached > 0)] += 1
            self.asked += 1

    @property
    def counts(self) -> Floats:
        if self._steps:
            self._counts *= self._forgetting**self._steps
            self._steps = 0
        return self._counts


class Survival:
    """Rates of a method and of each sequence, the latter shrunk towards its method's."""

    def __init__(self, levels: int) -> None:
        self._levels = levels
        self._methods: defaultdict[str | None, _Counts] = defaultdict(lambda: _Counts(levels, _FORGETTING_OF_METHOD))
        self._sequences: defaultdict[Sequence, _Counts] = defaultdict(lambda: _Counts(levels, _FORGETTING))

    def learn(self, verdict: Verdict, asked: bool) -> None:
        """Learn from a step.

        Counts of a sequence that was not asked to draft fade too: its rates return to those of its method.
        """
        counts = self._sequences[verdict.seq]
        counts.add(verdict, asked)
        if asked and counts.asked <= _TYPICAL:
            self._methods[verdict.seq.request.method].add(verdict, asked)

    def of(self, seqs: Seq[Sequence]) -> tuple[Floats, Floats]:
        """[B] probability that a draft is offered when asked for; [B, levels] that, if so, the level is accepted."""
        counts = np.stack([self._sequences[seq].counts for seq in seqs])
        priors = {method: self._rates(method) for method in {seq.request.method for seq in seqs}}
        prior = np.stack([priors[seq.request.method] for seq in seqs])
        # The mean of a beta distribution: few trials of a sequence move it little from its method's rate.
        rates = (counts[:, 0] + _PRIOR_WEIGHT * prior) / (counts[:, 1] + _PRIOR_WEIGHT)
        # Rates are conditional on the level above; all levels down to one are accepted with their product.
        survival: Floats = np.cumprod(rates[:, 1:], axis=1)
        return rates[:, 0], survival

    def _rates(self, method: str | None) -> Floats:
        """[1 + levels] rates of a method; a level that was seldom reached is assumed to be like the one above it."""
        accepted, reached = self._methods[method].counts
        rates, above = np.empty(1 + self._levels), _FIRST_GUESS
        rates[0] = (accepted[0] + _PRIOR_WEIGHT) / (reached[0] + _PRIOR_WEIGHT)
        for level in range(1, 1 + self._levels):
            above = (accepted[level] + _PRIOR_WEIGHT * above) / (reached[level] + _PRIOR_WEIGHT)
            rates[level] = above
        return rates

    def release(self, seq: Sequence) -> None:
        self._sequences.pop(seq, None)
