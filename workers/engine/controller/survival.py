"""How likely the levels of a draft are to be accepted, learnt from those that were put to the test."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Seq

import numpy as np

from workers.engine.controller.costs import Floats
from workers.engine.sequence import Sequence
from workers.engine.verifier import Verdict

_FORGETTING, _FORGETTING_OF_METHOD = 0.98, 0.998
"""What counts keep of their weight with each step: of the sequence, of all sequences with its method."""
_TYPICAL = 16
"""Drafts of a sequence that count for its method. With all of them, what is known of new sequences would be what is
known of those that drafts suit, as those draft most."""
_PRIOR_WEIGHT = 8.0
"""Levels that a prior counts for."""
_FIRST_GUESS = 0.6


class _Counts:
    """Levels that were accepted and that were put to the test, [2, levels], the older ones counting less."""

    def __init__(self, levels: int) -> None:
        self.levels: Floats = np.zeros((2, levels))
        self.drafts = 0

    def add(self, verdict: Verdict, forgetting: float) -> None:
        self.levels *= forgetting
        self.levels[0, : len(verdict.path)] += 1
        self.levels[1, : verdict.reached] += 1
        self.drafts += verdict.reached > 0


class Survival:
    """Conditional acceptance by level: of a method, and of each sequence, shrunk towards its method's."""

    def __init__(self, levels: int) -> None:
        self._levels = levels
        self._methods: defaultdict[str | None, _Counts] = defaultdict(self._none)
        self._sequences: defaultdict[Sequence, _Counts] = defaultdict(self._none)

    def _none(self) -> _Counts:
        return _Counts(self._levels)

    def learn(self, verdict: Verdict) -> None:
        """A sequence that did not draft forgets as well, and so comes back to what its method is worth."""
        counts = self._sequences[verdict.seq]
        counts.add(verdict, _FORGETTING)
        if verdict.reached and counts.drafts <= _TYPICAL:
            self._methods[verdict.seq.request.method].add(verdict, _FORGETTING_OF_METHOD)

    def of(self, seqs: Seq[Sequence]) -> Floats:
        """[B, levels] probability that the level and all above it are accepted."""
        counts = np.stack([self._sequences[seq].levels for seq in seqs])
        priors = {method: self._rates(method) for method in {seq.request.method for seq in seqs}}
        prior = np.stack([priors[seq.request.method] for seq in seqs])
        rates = (counts[:, 0] + _PRIOR_WEIGHT * prior) / (counts[:, 1] + _PRIOR_WEIGHT)
        survival: Floats = np.cumprod(rates, axis=1)
        return survival

    def _rates(self, method: str | None) -> Floats:
        """[levels]; a level that was seldom reached is taken to be like the one above it."""
        accepted, reached = self._methods[method].levels
        rates, above = np.empty(self._levels), _FIRST_GUESS
        for level in range(self._levels):
            above = (accepted[level] + _PRIOR_WEIGHT * above) / (reached[level] + _PRIOR_WEIGHT)
            rates[level] = above
        return rates

    def release(self, seq: Sequence) -> None:
        self._sequences.pop(seq, None)
