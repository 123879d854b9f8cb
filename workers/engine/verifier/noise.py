"""Random numbers of the rules that draw apart from the draft (docs/verification.md, "Seeds").

Each is a function of the request's key, the position and the step that asks, and of nothing else: no slot, no batch, no
order of drawing. The step is in the key because rules that look beyond what they accept (block verification) leave
positions behind whose numbers have shaped the output; the next step must not see them again.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import torch

from workers.engine.kernels.cpu.philox import ACCEPT, DRAFT, RESIDUAL, uniform_at


@dataclass(frozen=True, slots=True)
class Place:
    """Where a number is needed: `depth` tokens into a step that began with `start` tokens."""

    key: int
    """`Sequence.key`"""
    start: int
    depth: int

    @property
    def counter(self) -> int:
        """Position, and above its 32 bits the depth: together they say when the step began."""
        return self.start + self.depth | self.depth << 32


class Noise(Protocol):
    """Uniforms in [0, 1), float64."""

    def accept(self, places: Seq[Place], count: int) -> torch.Tensor:
        """[A, count]: one for each sibling that may be put to the test at that place."""
        ...

    def choose(self, places: Seq[Place]) -> torch.Tensor:
        """[A]: for the token that follows the last accepted one."""
        ...


class PhiloxNoise:
    def accept(self, places: Seq[Place], count: int) -> torch.Tensor:
        keys, counters = _split(places)
        return uniform_at(keys, counters, torch.arange(count).expand(len(places), count).numpy(), ACCEPT)

    def choose(self, places: Seq[Place]) -> torch.Tensor:
        keys, counters = _split(places)
        return uniform_at(keys, counters, [[0]] * len(places), RESIDUAL)[:, 0]


def draft_uniforms(places: Seq[Place], count: int) -> torch.Tensor:
    """[A, count] in [0, 1), float64: for the siblings of a draft that draws its candidates apart from the target."""
    keys, counters = _split(places)
    return uniform_at(keys, counters, torch.arange(count).expand(len(places), count).numpy(), DRAFT)


def _split(places: Seq[Place]) -> tuple[list[int], list[int]]:
    return [place.key for place in places], [place.counter for place in places]
