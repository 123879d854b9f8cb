"""The controller: how long a draft each sequence gets in the coming step."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from workers.engine.config import SpeculationConfig
from workers.engine.sequence import Sequence
from workers.engine.verifier import Verdict

_SMOOTHING = 0.3
"""Weight of the newest step in a sequence's acceptance rate."""
_FIRST_PROBE, _LAST_PROBE = 16, 256
"""Tokens until a sequence that stopped drafting tries one token again; doubles while the trial fails."""


class Controller(Protocol):
    """Plans draft lengths: depth of the draft, 0 meaning plain decoding. Exactness never depends on it."""

    def plan(self, seqs: Seq[Sequence]) -> list[int]: ...
    def observe(self, verdict: Verdict, depth: int) -> None:
        """Learn from a step in which a draft of `depth` levels was verified (0: none was)."""
        ...

    def release(self, seq: Sequence) -> None: ...


class FixedController:
    """Always the same length. A draft never reaches past the end: the bonus is the last token that may be emitted."""

    def __init__(self, config: SpeculationConfig) -> None:
        self._length = config.max_draft_tokens

    def plan(self, seqs: Seq[Sequence]) -> list[int]:
        return [max(0, min(self._length, seq.num_remaining - 1)) for seq in seqs]

    def observe(self, verdict: Verdict, depth: int) -> None:
        pass

    def release(self, seq: Sequence) -> None:
        pass


@dataclass(slots=True)
class _Recent:
    length: int
    rate: float
    probe_every: int = _FIRST_PROBE
    idle: int = 0


class ThresholdController:
    """Lengthens where drafts are accepted, shortens where they are not, and rests at 0 between probes.

    Per sequence: an exponential average of accepted / drafted depth; above `raise_above` one level more, below
    `lower_below` one less.
    """

    def __init__(self, config: SpeculationConfig) -> None:
        self._config = config
        self._recent: dict[Sequence, _Recent] = {}

    def plan(self, seqs: Seq[Sequence]) -> list[int]:
        return [max(0, min(self._length(seq), seq.num_remaining - 1)) for seq in seqs]

    def _length(self, seq: Sequence) -> int:
        recent = self._recent.get(seq)
        if recent is None:
            middle = (self._config.lower_below + self._config.raise_above) / 2
            recent = self._recent[seq] = _Recent((self._config.max_draft_tokens + 1) // 2, middle)
        if recent.length == 0 and recent.idle >= recent.probe_every:
            return 1
        return recent.length

    def observe(self, verdict: Verdict, depth: int) -> None:
        recent = self._recent.get(verdict.seq)
        if recent is None:
            return
        if depth == 0:
            recent.idle += verdict.emitted
            return
        accepted = len(verdict.path)
        if recent.length == 0:
            self._judge_probe(recent, accepted > 0)
            return
        recent.rate += _SMOOTHING * (accepted / depth - recent.rate)
        if recent.rate > self._config.raise_above:
            recent.length = min(recent.length + 1, self._config.max_draft_tokens)
        elif recent.rate < self._config.lower_below:
            recent.length -= 1
            recent.idle = 0

    def _judge_probe(self, recent: _Recent, success: bool) -> None:
        recent.idle = 0
        if success:
            recent.length = 1
            recent.rate = (self._config.lower_below + self._config.raise_above) / 2
            recent.probe_every = _FIRST_PROBE
        else:
            recent.probe_every = min(recent.probe_every * 2, _LAST_PROBE)

    def release(self, seq: Sequence) -> None:
        self._recent.pop(seq, None)


def make_controller(config: SpeculationConfig) -> Controller:
    return FixedController(config) if config.policy == "fixed" else ThresholdController(config)
