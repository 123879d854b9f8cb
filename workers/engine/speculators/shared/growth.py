"""Growing a draft tree level by level from scored candidates; every drafter that scores tokens shares it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch

from workers.engine.api.tree_shape import RankPath, TreeShape
from workers.engine.sampler import RowContext
from workers.engine.speculators.shared.drawing import DraftNoise, draw_candidates
from workers.engine.state.sequence import Sequence
from workers.engine.state.tree import ROOT, DraftTree


@dataclass(frozen=True, slots=True)
class _Candidate:
    token: int
    parent: int
    score: float
    path: tuple[int, ...]
    """Tokens from the first level down to this one."""
    ranks: RankPath


class TreeGrowth:
    """The draft tree of one sequence while it is drafted.

    For a greedy request a candidate's score is the sum of log q over its path. At temperature > 0 it is the sum of
    (log q + g) - max(log q + g), with the target's noise g: 0 for the path that always takes the best token, which is
    the path of the target if it agrees with the draft, and less for every other path.

    With noise drawn apart, whether a candidate is kept must not depend on how it was drawn. So every candidate is kept,
    the shape must be a chain or fixed paths, and a token that ends the sequence only ends its path.
    """

    def __init__(
        self,
        seq: Sequence,
        depth: int,
        shape: TreeShape,
        vocab_size: int,
        noise: DraftNoise = DraftNoise.COUPLED,
    ) -> None:
        self.noise = noise
        self._apart = noise is DraftNoise.APART and seq.params.temperature != 0.0
        if self._apart and not shape.paths and (shape.width > 1 or shape.nodes is not None):
            raise ValueError(
                "candidates drawn apart need a chain or fixed paths: a beam drops some by how they were drawn"
            )
        self.seq = seq
        self._shape = shape = shape.without_gaps() if self._apart else shape
        self._levels_left = min(depth, shape.max_depth or depth)
        self.vocab_size = vocab_size
        self._greedy = seq.params.temperature == 0.0
        self._candidates: list[_Candidate] = []
        self._expanded: list[int] = []
        """Candidates that were, or are about to be, fed to the drafter."""
        self._frontier: list[int] = [ROOT]
        self._proposals: dict[int, torch.Tensor] = {}
        """What the children of a candidate, or of the root, were drawn from."""
        self._fixed = frozenset(shape.paths)

    @property
    def growing(self) -> bool:
        return self._levels_left > 0 and bool(self._frontier)

    @property
    def num_expanded(self) -> int:
        return len(self._expanded)

    @property
    def first_of_frontier(self) -> int:
        """Index of the frontier's first node in `expanded_tree`."""
        return len(self._expanded) - len(self._frontier)

    @property
    def num_children(self) -> int:
        """How many candidates `extend` wants for each frontier node."""
        if not self._fixed:
            return self._shape.width
        # Ranks count from 0, so one more than the highest rank that the paths name at this depth.
        depth = 1 + max((len(self._ranks(node)) for node in self._frontier), default=0)
        return 1 + max((path[-1] for path in self._fixed if len(path) == depth), default=0)

    def frontier_paths(self) -> list[tuple[int, ...]]:
        """Token path of each node to expand, in order; the root's is empty."""
        return [() if node == ROOT else self._candidates[node].path for node in self._frontier]

    def expanded_tree(self) -> DraftTree:
        """The nodes that the drafter has to feed, the frontier last."""
        return self._subtree(self._expanded)

    def extend(
        self, tokens: Seq[Seq[int]], scores: Seq[Seq[float]], proposals: Seq[torch.Tensor | None] | None = None
    ) -> None:
        """Add a level below the frontier.

        tokens, scores: [frontier, at least num_children], best first in each row. A score is log q for greedy requests,
        log q + g with the noise g of the position otherwise, and -inf where there is no candidate. proposals: for each
        row the distribution that it was drawn from; needed where candidates are drawn apart. Raises ValueError when the
        numbers of rows differ.
        """
        if self._apart:
            drawn_from = zip(self._frontier, proposals or (), strict=True)
            self._proposals.update((node, proposal) for node, proposal in drawn_from if proposal is not None)
        level = [
            candidate
            for node, row_tokens, row_scores in zip(self._frontier, tokens, scores, strict=True)
            for candidate in self._children(node, row_tokens, row_scores)
        ]
        first = len(self._candidates)
        best = sorted(range(len(level)), key=lambda index: (-level[index].score, index))[: self._shape.width]
        if not self._fixed and self._shape.nodes is None:
            # A beam drops all but the best for good. A dynamic tree keeps them: `tree` compares levels at the end.
            level = [level[index] for index in best]
            best = list(range(len(level)))
        self._candidates.extend(level)
        self._levels_left -= 1
        self._frontier = []
        if self._levels_left > 0:
            # In order of creation, whatever the score: parents must come before their children.
            chosen = range(len(level)) if self._fixed else sorted(best)
            self._frontier = [first + index for index in chosen if self._may_expand(level[index])]
            self._expanded.extend(self._frontier)

    def _children(self, node: int, tokens: Seq[int], scores: Seq[float]) -> list[_Candidate]:
        parent = None if node == ROOT else self._candidates[node]
        base = parent.score if parent else 0.0
        children = []
        for rank, (token, score) in enumerate(zip(tokens, scores, strict=True)):
            ranks = (*self._ranks(node), rank)
            if self._wants(ranks) and self._worth_drafting(token, score):
                # With noise the best child gives nothing away: it has the score of its parent.
                gain = score if self._greedy else score - scores[0]
                path = (*(parent.path if parent else ()), token)
                children.append(_Candidate(token, node, base + gain, path, ranks))
        return children

    def _ranks(self, node: int) -> RankPath:
        return () if node == ROOT else self._candidates[node].ranks

    def _wants(self, ranks: RankPath) -> bool:
        return ranks in self._fixed if self._fixed else ranks[-1] < self._shape.width

    def _may_expand(self, candidate: _Candidate) -> bool:
        if self._apart and self.seq.ends_with(candidate.token):
            return False
        if not self._fixed:
            return True
        return any(path[:-1] == candidate.ranks for path in self._fixed)

    def _worth_drafting(self, token: int, score: float) -> bool:
        """A token that ends the sequence gains nothing: the target emits it as the bonus anyway."""
        if self._apart:
            return score > float("-inf")
        return score > float("-inf") and token < self.vocab_size and not self.seq.ends_with(token)

    def tree(self) -> DraftTree:
        """The tree to propose, once no level is to be added."""
        kept = self._kept()
        tree = self._subtree(kept)
        if not (self._apart and kept):
            return tree
        parents = dict.fromkeys(self._candidates[candidate].parent for candidate in kept)
        return replace(tree, probabilities=tuple(self._proposals[parent] for parent in parents))

    def expanded_path(self, path: Seq[int]) -> list[int]:
        """Where the nodes of an accepted path of `tree` lie in `expanded_tree`, as far down as they were fed."""
        kept = self._kept()
        place = {candidate: index for index, candidate in enumerate(self._expanded)}
        fed = [place.get(kept[node]) for node in path]
        return [index for index in fed[: fed.index(None) if None in fed else None] if index is not None]

    def _kept(self) -> list[int]:
        """Candidates of the tree in creation order. Scores never rise along a path, so the best form a tree; on a tie
        the earlier candidate wins, and parents are earlier than their children."""
        indices = range(len(self._candidates))
        if self._shape.nodes is None:
            return list(indices)
        ranked = sorted(indices, key=lambda index: (-self._candidates[index].score, index))
        return sorted(ranked[: self._shape.nodes])

    def _subtree(self, members: Seq[int]) -> DraftTree:
        index = {candidate: node for node, candidate in enumerate(members)}
        chosen = [self._candidates[candidate] for candidate in members]
        return DraftTree(
            tuple(candidate.token for candidate in chosen),
            tuple(ROOT if candidate.parent == ROOT else index[candidate.parent] for candidate in chosen),
        )


def extend_all(growing: Seq[TreeGrowth], logits: torch.Tensor) -> None:
    """Add a level to every tree, all of the same noise, from the draft's logits, [frontier nodes in order, V]."""
    contexts = [RowContext(growth.seq, path) for growth in growing for path in growth.frontier_paths()]
    count = max(growth.num_children for growth in growing)
    drawn = draw_candidates(logits[: len(contexts)], contexts, count, growing[0].vocab_size, growing[0].noise)
    row = 0
    for growth in growing:
        end = row + len(growth.frontier_paths())
        growth.extend(drawn.tokens[row:end], drawn.scores[row:end], drawn.proposals[row:end])
        row = end
