"""What every rule shares: emitting token by token along a draft tree, and counting what came of it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import torch

from workers.engine.api.errors import SamplingFailed
from workers.engine.api.request import TokenLogprob
from workers.engine.state.batch import Feed
from workers.engine.state.sequence import Sequence
from workers.engine.state.tree import ROOT

_IMPOSSIBLE = (
    "no token can be sampled: every one is masked (loosen logit_bias, bad_words, stop_token_ids or min_tokens), or the "
    "model's logits are NaN or infinite (check its weights and dtype)"
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one step emitted for one sequence; the tokens are in `Sequence.tokens` already."""

    seq: Sequence
    emitted: int
    path: tuple[int, ...]
    """Accepted nodes, root side first; emitted = len(path) + 1, the last token being the bonus."""
    reached: int
    """Levels of the draft that were put to the test: those of the path, and the one that was rejected, if any."""


class Verifier(Protocol):
    def verify(self, feeds: Seq[Feed], logits: torch.Tensor, offsets: Seq[int]) -> list[Verdict]:
        """Emit tokens for every feed, one verdict each.

        `logits` is [R, V]; row offsets[i] belongs to the last token of feed i, the rows after it to its tree's nodes.
        The sequences are extended, finished where they end, and their acceptance statistics counted.
        """
        ...


class Descent:
    """One sequence's walk down its draft tree. At `node` now; `row` is the row of the logits after it."""

    __slots__ = ("_children", "_draws", "_offset", "_path", "_reached", "emitted", "feed", "node", "start")

    def __init__(self, feed: Feed, offset: int) -> None:
        self.feed = feed
        self.start = len(feed.seq)
        """Tokens before this step."""
        self.emitted = 0
        self.node = ROOT
        self._offset = offset
        self._children = feed.tree.children() if feed.tree.tokens else {}
        self._draws = {parent: draw for draw, parent in enumerate(self._children)}
        self._path: list[int] = []
        self._reached = 0

    @property
    def seq(self) -> Sequence:
        return self.feed.seq

    @property
    def row(self) -> int:
        return self.row_of(self.node)

    def row_of(self, node: int) -> int:
        return self._offset + 1 + node

    def children(self, node: int) -> dict[int, int]:
        """token -> child, in the order in which the draft drew them."""
        return self._children.get(node, {})

    def proposal(self, node: int) -> torch.Tensor | None:
        """[V'] distribution that the children of `node` were drawn from; None where nothing was drawn."""
        probabilities, draw = self.feed.tree.probabilities, self._draws.get(node)
        return None if probabilities is None or draw is None else probabilities[draw]

    def emit(self, token: int, child: int | None, logprob: TokenLogprob | None = None) -> bool:
        """Emit the token that `child` carries, or with None the bonus. True when the walk goes on from the child.

        A negative token, for a row that nothing can be sampled from, ends the sequence in an error.
        """
        seq = self.feed.seq
        if token < 0:
            seq.fail(SamplingFailed(_IMPOSSIBLE))
            return False
        seq.emit(token)
        if logprob is not None:
            seq.logprobs.append(logprob)
        self.emitted += 1
        if self.node in self._children and not (seq.finished and child is not None):
            self._reached += 1
        if seq.finished or child is None:
            return False
        self.node = child
        self._path.append(child)
        return True

    def close(self) -> Verdict:
        """Count the step. What a failed sequence emitted is thrown away, and so is its count."""
        seq, tree = self.feed.seq, self.feed.tree
        trimmed = sum(depth > self.emitted for depth in tree.depths()) if seq.finished else 0
        accepted = len(self._path)
        seq.stats.count_step(drafted=len(tree), accepted=accepted, trimmed=trimmed, reached=self._reached)
        return Verdict(seq, self.emitted, tuple(self._path), self._reached)


def descents_of(feeds: Seq[Feed], offsets: Seq[int]) -> list[Descent]:
    return [Descent(feed, offset) for feed, offset in zip(feeds, offsets, strict=True)]


def rows_of(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """logits[rows], without a copy where they are the first ones in order."""
    if rows == list(range(len(rows))):
        return logits[: len(rows)]
    return logits[torch.tensor(rows, device=logits.device)]


def emit_all(
    active: Seq[Descent], tokens: Seq[int], children: Seq[int | None], logprobs: Seq[TokenLogprob | None]
) -> list[Descent]:
    """Emit one token for each; returns the descents that go on. `logprobs` may be empty."""
    return [
        descent
        for index, (descent, token, child) in enumerate(zip(active, tokens, children, strict=True))
        if descent.emit(token, child, logprobs[index] if logprobs else None)
    ]
