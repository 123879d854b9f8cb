"""What a drafter would have got accepted on answers that are known: a replay of serving, as chains."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from workers.training.documents import Document
from workers.training.drafter import Outcome


@dataclass(frozen=True, slots=True)
class Simulation:
    """Counts; they add up."""

    tokens: int = 0
    steps: int = 0
    reached: tuple[int, ...] = ()
    """Rows, by depth, at which all depths before were right, of all rows there are."""
    right: tuple[int, ...] = ()
    """Those of them that are right at this depth too."""

    def __add__(self, other: Simulation) -> Simulation:
        return Simulation(
            self.tokens + other.tokens,
            self.steps + other.steps,
            _added(self.reached, other.reached),
            _added(self.right, other.right),
        )

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / max(1, self.steps)

    @property
    def acceptance(self) -> tuple[float, ...]:
        """By depth, given that the depths before were right: what serving sees. (Unconditional accuracy misleads.)"""
        return tuple(right / max(1, reached) for right, reached in zip(self.right, self.reached, strict=True))


def simulate(documents: Seq[Document], outcome: Outcome) -> Simulation:
    """Replay each answer: the pass over its prompt is a step and emits the first token; each further one emits what was
    drafted right, and one token more.

    Rows of `outcome` are those of the documents' answers, in order; at depth j the last j rows of each are missing.
    """
    counts = [len(document) - 2 - max(0, document.num_prompt - 2) for document in documents]
    wide = _aligned(outcome.right, counts)
    alive = torch.cumprod(wide.long(), dim=0).bool()
    there = _aligned([torch.ones_like(right) for right in outcome.right], counts)
    before = torch.cat([torch.ones_like(alive[:1]), alive[:-1]])
    accepted = alive.sum(0).tolist()
    tokens = steps = start = 0
    for document, count in zip(documents, counts, strict=True):
        # Its first row drafts the first token of the answer, which the target draws from the prompt.
        row = 1 if document.num_prompt >= 2 else 0
        tokens, steps = tokens + 1, steps + 1
        while row < count:
            step = accepted[start + row] + 1
            tokens += min(step, count - row)
            steps += 1
            row += step
        start += count
    return Simulation(tokens, steps, tuple((before & there).sum(1).tolist()), tuple(alive.sum(1).tolist()))


def _aligned(right: Seq[torch.Tensor], counts: Seq[int]) -> torch.Tensor:
    """[depths, rows of the first depth] bool; False where a depth has no row."""
    wide = torch.zeros(len(right), sum(counts), dtype=torch.bool)
    for depth, values in enumerate(right):
        taken = start = 0
        for count in counts:
            rows = max(0, count - depth)
            wide[depth, start : start + rows] = values[taken : taken + rows]
            taken, start = taken + rows, start + count
    return wide


def _added(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    size = max(len(a), len(b))
    a, b = ((*counts, *[0] * (size - len(counts))) for counts in (a, b))
    return tuple(x + y for x, y in zip(a, b, strict=True))
