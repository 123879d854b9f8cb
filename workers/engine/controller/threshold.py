"""Policy `threshold`: lengths by acceptance alone, whatever steps cost, so that a run repeats itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from workers.engine.api.config import SpeculationConfig
from workers.engine.controller.controller import StepCost, room
from workers.engine.state.sequence import Sequence
from workers.engine.verifier import Verdict

_FORGETTING, _FORGETTING_OF_METHOD = 0.9, 0.995
"""What counts keep of their weight with each draft: of the sequence, of all sequences with its method."""
_PRIOR_WEIGHT = 8.0
"""Levels that a prior counts for."""
_FIRST_PROBE, _LAST_PROBE = 16, 256
"""Tokens until a sequence that stopped drafting tries one token again; doubles while the trial fails."""


@dataclass(slots=True)
class _Counts:
    """Levels of drafts that were accepted, and that were put to the test, the older ones counting less."""

    accepted: float = 0.0
    reached: float = 0.0

    def add(self, verdict: Verdict, forgetting: float) -> None:
        self.accepted = forgetting * self.accepted + len(verdict.path)
        self.reached = forgetting * self.reached + verdict.reached

    def rate(self, prior: float) -> float:
        """Acceptance of a level whose parents are accepted, shrunk towards `prior`."""
        return (self.accepted + _PRIOR_WEIGHT * prior) / (self.reached + _PRIOR_WEIGHT)


@dataclass(slots=True)
class _Drafting:
    """One sequence's length, and what it rests on."""

    length: int
    counts: _Counts
    probe_every: int = _FIRST_PROBE
    idle: int = 0
    """Tokens since it last drafted; counted at length 0."""


class ThresholdController:
    """Lengthens where drafts are accepted, shortens where they are not, and rests at 0 between probes.

    A sequence drafts one level more while its conditional acceptance (accepted / reached, its own shrunk towards that
    of its method) is above `raise_above`, one level less while it is below `lower_below`. Accepted / drafted would not
    do: it falls with the length of the draft itself, and so would punish long drafts for being long.
    """

    def __init__(self, config: SpeculationConfig) -> None:
        self._config = config
        self._middle = (config.lower_below + config.raise_above) / 2
        self._sequences: dict[Sequence, _Drafting] = {}
        self._methods: defaultdict[str | None, _Counts] = defaultdict(_Counts)

    def plan(self, seqs: Seq[Sequence]) -> list[int]:
        return [room(seq, self._length(seq)) for seq in seqs]

    def _length(self, seq: Sequence) -> int:
        drafting = self._sequences.get(seq)
        if drafting is None:
            drafting = self._sequences[seq] = _Drafting(self._first_length(seq), _Counts())
        return drafting.length or int(drafting.idle >= drafting.probe_every)

    def _first_length(self, seq: Sequence) -> int:
        """Where the sequences before it ended up, roughly."""
        rate = self._method_rate(seq)
        if rate > self._config.raise_above:
            return self._config.depth
        return 1 if rate < self._config.lower_below else (self._config.depth + 1) // 2

    def _method_rate(self, seq: Sequence) -> float:
        return self._methods[seq.request.method].rate(self._middle)

    def observe(self, verdict: Verdict) -> None:
        drafting = self._sequences.get(verdict.seq)
        if drafting is None:
            return
        if verdict.reached == 0:
            drafting.idle += verdict.emitted
            return
        drafting.counts.add(verdict, _FORGETTING)
        self._methods[verdict.seq.request.method].add(verdict, _FORGETTING_OF_METHOD)
        if drafting.length == 0:
            self._judge_probe(drafting, bool(verdict.path))
            return
        rate = drafting.counts.rate(self._method_rate(verdict.seq))
        if rate > self._config.raise_above:
            drafting.length = min(drafting.length + 1, self._config.depth)
        elif rate < self._config.lower_below:
            drafting.length -= 1
            drafting.idle = 0

    def _judge_probe(self, drafting: _Drafting, success: bool) -> None:
        drafting.idle = 0
        if success:
            drafting.length = 1
            drafting.probe_every = _FIRST_PROBE
            drafting.counts = _Counts(_PRIOR_WEIGHT * self._middle, _PRIOR_WEIGHT)
        else:
            drafting.probe_every = min(drafting.probe_every * 2, _LAST_PROBE)

    def timed(self, cost: StepCost) -> None:
        pass

    def release(self, seq: Sequence) -> None:
        self._sequences.pop(seq, None)
