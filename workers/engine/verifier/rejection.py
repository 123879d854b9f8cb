"""Rule "rejection": exact in distribution, for drafts that kept what they were drawn from and for fixed ones."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from workers.engine.sampler import RowContext, distributions, logprobs_of
from workers.engine.state.batch import Feed
from workers.engine.verifier.descent import Descent, Verdict, descents_of, emit_all, rows_of
from workers.engine.verifier.noise import Noise, PhiloxNoise, Place
from workers.engine.verifier.rules import NONE, choose, try_siblings


class RejectionVerifier:
    """Accept x with probability min(1, p(x) / q(x)), else draw from what q left over of p.

    Chains: Leviathan et al. (arXiv 2211.17192), Chen et al. (arXiv 2302.01318). Trees: siblings one after the other, in
    the order in which they were drawn without replacement. All sequences descend one level at a time, so distributions
    are computed for rows that are reached, and a residual only where something was rejected.
    """

    def __init__(self, noise: Noise | None = None) -> None:
        self._noise = noise or PhiloxNoise()

    def verify(self, feeds: Seq[Feed], logits: torch.Tensor, offsets: Seq[int]) -> list[Verdict]:
        descents = descents_of(feeds, offsets)
        active = descents
        while active:
            active = self._descend(active, logits)
        return [descent.close() for descent in descents]

    def _descend(self, active: list[Descent], logits: torch.Tensor) -> list[Descent]:
        rows = rows_of(logits, [descent.row for descent in active])
        contexts = [RowContext(descent.seq) for descent in active]
        p = distributions(rows, contexts)
        places = [Place(descent.seq.key, descent.start, descent.emitted) for descent in active]
        candidates = [list(descent.children(descent.node).items()) for descent in active]
        accepted = self._try_all(active, p, places, candidates)
        rejected = [i for i, sibling in enumerate(accepted) if sibling == NONE]
        steps: list[tuple[int, int | None]] = [
            options[sibling] if sibling != NONE else (NONE, None)
            for options, sibling in zip(candidates, accepted, strict=True)
        ]
        if rejected:
            drawn = choose(p[rejected], self._noise.choose([places[i] for i in rejected]))
            for i, token in zip(rejected, drawn.tolist(), strict=True):
                steps[i] = token, None
        tokens = [token for token, _ in steps]
        return emit_all(active, tokens, [child for _, child in steps], logprobs_of(rows, contexts, tokens))

    def _try_all(
        self, active: list[Descent], p: torch.Tensor, places: Seq[Place], candidates: Seq[Seq[tuple[int, int]]]
    ) -> list[int]:
        """Index of the accepted candidate of each, or NONE; p becomes what to draw from. Drawn and fixed ones apart."""
        accepted = [NONE] * len(active)
        proposals = [descent.proposal(descent.node) for descent in active]
        fixed = [i for i, row in enumerate(proposals) if candidates[i] and row is None]
        drawn = [i for i, row in enumerate(proposals) if row is not None]
        for group in filter(None, (fixed, drawn)):
            q = stacked([proposals[i] for i in group], like=p) if group is drawn else None
            width = max(len(candidates[i]) for i in group)
            tokens = [[token for token, _ in candidates[i]] + [NONE] * (width - len(candidates[i])) for i in group]
            uniforms = self._noise.accept([places[i] for i in group], width)
            rest = p if len(group) == len(p) else p[group]
            result = try_siblings(rest, q, torch.tensor(tokens), uniforms)
            if rest is not p:
                p[group] = rest
            for i, sibling in zip(group, result.tolist(), strict=True):
                accepted[i] = sibling
        return accepted


def stacked(proposals: Seq[torch.Tensor | None], like: torch.Tensor) -> torch.Tensor:
    """Proposals in one tensor of the dtype and width of `like`: a draft may know fewer tokens than the target."""
    known = [proposal for proposal in proposals if proposal is not None and len(proposal) == like.shape[1]]
    if len(known) == len(proposals):
        return torch.stack(known).to(like.dtype)
    result = like.new_zeros(len(proposals), like.shape[1])
    for row, proposal in zip(result, proposals, strict=True):
        assert proposal is not None
        row[: len(proposal)] = proposal
    return result
