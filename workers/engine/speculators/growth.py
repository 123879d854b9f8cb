"""Growing a draft tree level by level from scored candidates."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from workers.engine.sequence import Sequence
from workers.engine.tree import ROOT, DraftTree


class TreeGrowth:
    """The draft tree of one sequence while it is drafted: each level keeps the best `width` candidates.

    A candidate's score is what its path gives away against always taking the best one: the sum of
    (log q + g) - max(log q + g) over its nodes. With the target's noise in g, the path that gives away nothing is the
    one that the target takes if it agrees with the draft. Width 1 is a chain.
    """

    def __init__(self, seq: Sequence, depth: int, width: int, vocab_size: int) -> None:
        self.seq = seq
        self._levels_left = depth
        self._width = width
        self._vocab_size = vocab_size
        self._tokens: list[int] = []
        self._parents: list[int] = []
        self._scores: list[float] = []
        self._paths: list[tuple[int, ...]] = []
        self._frontier: list[int] = [ROOT]

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def growing(self) -> bool:
        return self._levels_left > 0 and bool(self._frontier)

    @property
    def first_of_frontier(self) -> int:
        return self._frontier[0]

    def frontier_paths(self) -> list[tuple[int, ...]]:
        """Token path of each node to expand, in node order; the root's is empty."""
        return [() if node == ROOT else self._paths[node] for node in self._frontier]

    def extend(self, tokens: Seq[Seq[int]], scores: Seq[Seq[float]]) -> None:
        """Add a level. `tokens` and `scores` are [frontier, k], best first in each row."""
        candidates = [
            (score - row_scores[0] + (0.0 if node == ROOT else self._scores[node]), node, token)
            for node, row_tokens, row_scores in zip(self._frontier, tokens, scores, strict=True)
            for token, score in zip(row_tokens, row_scores, strict=True)
            if self._worth_drafting(token, score)
        ]
        candidates.sort(key=lambda candidate: -candidate[0])
        first = len(self._tokens)
        for score, parent, token in candidates[: self._width]:
            self._tokens.append(token)
            self._parents.append(parent)
            self._scores.append(score)
            self._paths.append((*(() if parent == ROOT else self._paths[parent]), token))
        self._frontier = list(range(first, len(self._tokens)))
        self._levels_left -= 1

    def _worth_drafting(self, token: int, score: float) -> bool:
        """A token that ends the sequence gains nothing: the target emits it as the bonus anyway."""
        return score > float("-inf") and token < self._vocab_size and not self.seq.ends_with(token)

    def tree(self) -> DraftTree:
        return DraftTree(tuple(self._tokens), tuple(self._parents))
