"""Rule "block": exact in distribution, the most tokens per step that a sampled chain can give."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from workers.engine.api.request import TokenLogprob
from workers.engine.sampler import RowContext, distributions, logprobs_of
from workers.engine.state.batch import Feed
from workers.engine.verifier.descent import Descent, Verdict, descents_of, rows_of
from workers.engine.verifier.noise import Noise, PhiloxNoise, Place
from workers.engine.verifier.rejection import stacked
from workers.engine.verifier.rules import block_level, choose


class BlockVerifier:
    """Accept the longest prefix that the whole block justifies (Sun et al., arXiv 2403.10444): never fewer tokens in
    expectation than token by token. Each drafted token is looked at, accepted or not, so each costs its distribution.
    """

    def __init__(self, noise: Noise | None = None) -> None:
        self._noise = noise or PhiloxNoise()

    def verify(self, feeds: Seq[Feed], logits: torch.Tensor, offsets: Seq[int]) -> list[Verdict]:
        for feed in feeds:
            if not feed.tree.is_chain:
                raise ValueError("block verification takes chains, not trees; use the rule rejection or exact")
        descents = descents_of(feeds, offsets)
        if not descents:
            return []
        scan = _Scan(descents, logits, self._noise)
        for depth in range(1 + max(len(feed.tree) for feed in feeds)):
            scan.look(depth)
        scan.emit()
        return [descent.close() for descent in descents]


class _Scan:
    """All chains of a step, looked at level by level; keeps what to draw from at the deepest level that may stand."""

    def __init__(self, descents: list[Descent], logits: torch.Tensor, noise: Noise) -> None:
        self._descents = descents
        self._logits = logits
        self._noise = noise
        self._weight = torch.ones(len(descents), dtype=torch.float64)
        self._accepted = torch.zeros(len(descents), dtype=torch.int64)
        self._final = torch.empty(0)

    def look(self, depth: int) -> None:
        """Level `depth`: the distributions after so many drafted tokens."""
        alive = [i for i, d in enumerate(self._descents) if len(d.feed.tree) >= depth and self._weight[i] > 0]
        if not alive:
            return
        p = distributions(
            rows_of(self._logits, [self._descents[i].row_of(depth - 1) for i in alive]),
            [self._context(self._descents[i], depth) for i in alive],
        )
        threshold, weights = self._weight[alive], p
        ends = torch.tensor([len(self._descents[i].feed.tree) == depth for i in alive])
        for drawn in (False, True):
            group = [
                n for n, i in enumerate(alive)
                if not ends[n] and (self._descents[i].proposal(depth - 1) is not None) == drawn
            ]  # fmt: skip
            if group:
                self._look_at(depth, group, alive, drawn, p, threshold)
        self._keep(depth, alive, threshold, weights)

    def _look_at(
        self, depth: int, group: list[int], alive: list[int], drawn: bool, p: torch.Tensor, threshold: torch.Tensor
    ) -> None:
        """Chains that go on beyond this level: replaces rows of p and threshold, and moves their weights on."""
        chosen = [alive[n] for n in group]
        chains = [self._descents[i] for i in chosen]
        q = stacked([chain.proposal(depth - 1) for chain in chains], like=p) if drawn else None
        tokens = torch.tensor([chain.feed.tree.tokens[depth] for chain in chains])
        level = block_level(p if len(group) == len(p) else p[group], q, self._weight[chosen], tokens)
        p[group], threshold[group] = level.weights, level.threshold
        self._weight[chosen] = level.weight

    def _keep(self, depth: int, alive: list[int], threshold: torch.Tensor, weights: torch.Tensor) -> None:
        if depth == 0:
            self._final = weights
            return
        places = [Place(self._descents[i].seq.key, self._descents[i].start, depth) for i in alive]
        stands = self._noise.accept(places, 1)[:, 0] < threshold
        chosen = torch.tensor(alive)[stands]
        self._final[chosen] = weights[stands]
        self._accepted[chosen] = depth

    def emit(self) -> None:
        places = [
            Place(descent.seq.key, descent.start, depth)
            for descent, depth in zip(self._descents, self._accepted.tolist(), strict=True)
        ]
        bonus = choose(self._final, self._noise.choose(places)).tolist()
        runs = [
            [*descent.feed.tree.tokens[:depth], token]
            for descent, depth, token in zip(self._descents, self._accepted.tolist(), bonus, strict=True)
        ]
        for descent, run, logprobs in zip(self._descents, runs, self._logprobs(runs), strict=True):
            for depth, token in enumerate(run):
                child = depth if depth < len(run) - 1 else None
                if not descent.emit(token, child, logprobs[depth] if logprobs else None):
                    break

    def _logprobs(self, runs: list[list[int]]) -> list[list[TokenLogprob | None]]:
        asking = [i for i, descent in enumerate(self._descents) if descent.seq.params.logprobs is not None]
        places = [(i, depth) for i in asking for depth in range(len(runs[i]))]
        result: list[list[TokenLogprob | None]] = [[] for _ in runs]
        if places:
            rows = rows_of(self._logits, [self._descents[i].row_of(depth - 1) for i, depth in places])
            contexts = [self._context(self._descents[i], depth) for i, depth in places]
            found = logprobs_of(rows, contexts, [runs[i][depth] for i, depth in places])
            for (i, _), logprob in zip(places, found, strict=True):
                result[i].append(logprob)
        return result

    @staticmethod
    def _context(descent: Descent, depth: int) -> RowContext:
        return RowContext(descent.seq, descent.feed.tree.tokens[:depth])
