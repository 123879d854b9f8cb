"""Rule "typical": Medusa's acceptance. Lossy: the output is no longer distributed as the target's."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from workers.engine.sampler import RowContext, distributions, logprobs_of, sample
from workers.engine.state.batch import Feed
from workers.engine.state.tree import ROOT
from workers.engine.verifier.descent import Descent, Verdict, descents_of, emit_all, rows_of
from workers.engine.verifier.rules import NONE, is_typical


@dataclass(frozen=True, slots=True)
class _Reached:
    """A node whose whole path is typical."""

    descent: Descent
    node: int = ROOT
    nodes: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    likelihood: float = 0.0
    """Sum of log p over the path."""

    def to(self, token: int, child: int, likelihood: float) -> _Reached:
        path = (*self.nodes, child), (*self.tokens, token)
        return _Reached(self.descent, child, *path, self.likelihood + likelihood)


class TypicalVerifier:
    """Emit the longest path on which every token is probable enough for the target, the likelier of equal ones; then
    one token sampled as plain decoding would. At temperature 0 that is exact; at any other a token that passes is taken
    although the target might have drawn another.
    """

    def __init__(self, epsilon: float, delta: float) -> None:
        self._epsilon = epsilon
        self._delta = delta

    def verify(self, feeds: Seq[Feed], logits: torch.Tensor, offsets: Seq[int]) -> list[Verdict]:
        descents = descents_of(feeds, offsets)
        best = {id(descent): _Reached(descent) for descent in descents}
        level = list(best.values())
        while level:
            level = self._next_level([reached for reached in level if reached.descent.children(reached.node)], logits)
            for reached in level:
                known = best[id(reached.descent)]
                if (len(reached.nodes), reached.likelihood) > (len(known.nodes), known.likelihood):
                    best[id(reached.descent)] = reached
        self._emit(list(best.values()), logits)
        return [descent.close() for descent in descents]

    def _next_level(self, level: list[_Reached], logits: torch.Tensor) -> list[_Reached]:
        if not level:
            return []
        rows = rows_of(logits, [reached.descent.row_of(reached.node) for reached in level])
        p = distributions(rows, [RowContext(reached.descent.seq, reached.tokens) for reached in level])
        pairs = [
            (index, token, child)
            for index, reached in enumerate(level)
            for token, child in reached.descent.children(reached.node).items()
        ]
        at = torch.tensor([index for index, _, _ in pairs]), torch.tensor([token for _, token, _ in pairs])
        passes, likelihoods = is_typical(p, self._epsilon, self._delta)[at].tolist(), p[at].log().tolist()
        return [
            level[index].to(token, child, likelihood)
            for (index, token, child), typical, likelihood in zip(pairs, passes, likelihoods, strict=True)
            if typical
        ]

    def _emit(self, best: list[_Reached], logits: torch.Tensor) -> None:
        """The path of each, then the sampled token, all sequences one token at a time."""
        active, depth = [reached.descent for reached in best], 0
        paths = {id(reached.descent): reached for reached in best}
        while active:
            rows = rows_of(logits, [descent.row for descent in active])
            contexts = [RowContext(descent.seq) for descent in active]
            ends = [i for i, descent in enumerate(active) if len(paths[id(descent)].nodes) == depth]
            steps: list[tuple[int, int | None]] = [
                (path.tokens[depth], path.nodes[depth]) if depth < len(path.nodes) else (NONE, None)
                for path in (paths[id(descent)] for descent in active)
            ]
            if ends:
                for i, token in zip(ends, sample(rows[ends], [contexts[i] for i in ends]).tokens, strict=True):
                    steps[i] = token, None
            tokens = [token for token, _ in steps]
            active = emit_all(active, tokens, [child for _, child in steps], logprobs_of(rows, contexts, tokens))
            depth += 1
