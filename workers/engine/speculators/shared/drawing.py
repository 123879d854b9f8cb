"""How a drafter draws its candidates: with the target's noise, or with noise of its own.

Coupled, for the rules exact and typical: the best by log q + g with the noise g that the target will use, so where
draft and target agree on the distribution they agree on the token. What it was drawn from does not matter to the rule.

Apart, for rejection and block: these rules need candidates that are independent of the target's noise and of each other
but for being distinct, and the distribution which they were really drawn from.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import Enum

import torch

from workers.engine.api.config import SpeculationConfig
from workers.engine.sampler import RowContext, distributions, perturbed_top_k, split
from workers.engine.verifier.noise import Place, draft_uniforms
from workers.engine.verifier.rules import choose


class DraftNoise(Enum):
    COUPLED = "coupled"
    APART = "apart"


def draft_noise_of(config: SpeculationConfig) -> DraftNoise:
    return DraftNoise.APART if config.draws_apart else DraftNoise.COUPLED


@dataclass(frozen=True, slots=True)
class Candidates:
    """The first `count` of each row, best or first drawn first; -1 with score -inf where there are no more."""

    tokens: list[list[int]]
    scores: list[list[float]]
    proposals: list[torch.Tensor | None]
    """[V'] per row: what its tokens were drawn from without replacement; None where nothing was drawn apart."""


def draw_candidates(
    logits: torch.Tensor, rows: Seq[RowContext], count: int, vocab_size: int, noise: DraftNoise
) -> Candidates:
    """Candidates of each row of the draft's `logits` [R, V']; of those drawn apart none is outside `vocab_size`.

    A greedy row's candidates are the best of log q, whatever the noise.
    """
    cold, warm = split(rows)
    if noise is DraftNoise.COUPLED or not warm:
        tokens, scores = perturbed_top_k(logits, rows, count)
        return Candidates(tokens.tolist(), scores.tolist(), [None] * len(rows))
    if not cold:
        return _draw_apart(logits[:, :vocab_size], rows, count)
    result = Candidates([[]] * len(rows), [[]] * len(rows), [None] * len(rows))
    fixed = draw_candidates(logits[cold], [rows[i] for i in cold], count, vocab_size, DraftNoise.COUPLED)
    drawn = _draw_apart(logits[warm, :vocab_size], [rows[i] for i in warm], count)
    for group, part in ((cold, fixed), (warm, drawn)):
        for n, i in enumerate(group):
            result.tokens[i], result.scores[i], result.proposals[i] = part.tokens[n], part.scores[n], part.proposals[n]
    return result


def _draw_apart(logits: torch.Tensor, rows: Seq[RowContext], count: int) -> Candidates:
    """Draws without replacement; scores are log q."""
    q = distributions(logits, rows)
    uniforms = draft_uniforms([Place(row.seq.key, len(row.seq), len(row.path)) for row in rows], count)
    tokens = torch.full((len(rows), count), -1)
    scores = torch.full((len(rows), count), -torch.inf)
    rest = q if count == 1 else q.clone()
    for sibling in range(count):
        drawn = choose(rest, uniforms[:, sibling])
        found = torch.nonzero(drawn >= 0)[:, 0]  # elsewhere nothing is left to draw
        tokens[found, sibling] = drawn[found]
        scores[found, sibling] = q[found, drawn[found]].log().float()
        if sibling + 1 < count:
            rest[found, drawn[found]] = 0.0
    return Candidates(tokens.tolist(), scores.tolist(), list(q))
