"""Verification: which drafted tokens stand, and what is emitted after them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import torch

from workers.engine.batch import Feed
from workers.engine.sampler import RowContext, Sampled, sample
from workers.engine.sequence import Sequence
from workers.engine.tree import ROOT


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one step emitted for one sequence; the tokens are in `Sequence.tokens` already."""

    seq: Sequence
    emitted: int
    path: tuple[int, ...]
    """Accepted nodes, root side first; emitted = len(path) + 1, the last token being the bonus."""


class Verifier(Protocol):
    def verify(self, feeds: Seq[Feed], logits: torch.Tensor, offsets: Seq[int]) -> list[Verdict]:
        """Emit tokens for every feed, one verdict each.

        `logits` is [R, V]; row offsets[i] belongs to the last token of feed i, the rows after it to its tree's nodes.
        The sequences are extended, finished where they end, and their acceptance statistics counted.
        """
        ...


class CoupledVerifier:
    """Exact, rule "coupled": sample as plain decoding would, and go on for as long as the draft holds the sample.

    The sampler's noise depends on (key, position, token) alone, so what is emitted is what plain decoding emits,
    whatever was drafted (Daliri, Musco and Suresh 2024, arXiv 2408.07978). All sequences descend one level at a time.
    """

    def verify(self, feeds: Seq[Feed], logits: torch.Tensor, offsets: Seq[int]) -> list[Verdict]:
        descents = [_Descent(feed, offset) for feed, offset in zip(feeds, offsets, strict=True)]
        active = descents
        while active:
            sampled = sample(_rows(logits, active), [RowContext(descent.feed.seq) for descent in active])
            active = [descent for index, descent in enumerate(active) if descent.emit(sampled, index)]
        return [descent.close() for descent in descents]


def _rows(logits: torch.Tensor, active: list[_Descent]) -> torch.Tensor:
    rows = [descent.row for descent in active]
    if rows == list(range(len(rows))):
        return logits[: len(rows)]
    return logits[torch.tensor(rows, device=logits.device)]


class _Descent:
    """One sequence's walk down its draft tree."""

    __slots__ = ("_children", "_node", "_offset", "_path", "_reached", "emitted", "feed", "row")

    def __init__(self, feed: Feed, offset: int) -> None:
        self.feed = feed
        self.row = offset
        self.emitted = 0
        self._offset = offset
        self._node = ROOT
        self._children = feed.tree.children() if feed.tree.tokens else {}
        self._path: list[int] = []
        self._reached = 0

    def emit(self, sampled: Sampled, index: int) -> bool:
        """Emit the sampled token; True when the draft holds it and the walk goes on."""
        seq, token = self.feed.seq, sampled.tokens[index]
        seq.emit(token)
        if sampled.logprobs and (logprob := sampled.logprobs[index]) is not None:
            seq.logprobs.append(logprob)
        self.emitted += 1
        candidates = self._children.get(self._node)
        child = candidates.get(token) if candidates else None
        if candidates and not (seq.finished and child is not None):
            self._reached += 1
        if seq.finished or child is None:
            return False
        self._node = child
        self._path.append(child)
        self.row = self._offset + 1 + child
        return True

    def close(self) -> Verdict:
        seq, tree = self.feed.seq, self.feed.tree
        trimmed = sum(depth > self.emitted for depth in tree.depths()) if seq.finished else 0
        accepted = len(self._path)
        seq.stats.count_step(drafted=len(tree), accepted=accepted, trimmed=trimmed, reached=self._reached)
        return Verdict(seq, self.emitted, tuple(self._path))


RULES: dict[str, type[CoupledVerifier]] = {"exact": CoupledVerifier}
