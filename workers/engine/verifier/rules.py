"""The rules as pure functions on tensors: distributions and uniforms in, decisions out; one row per sequence.

p is what the target samples from and q what the draft was drawn from, both after all processing. A uniform u in [0, 1)
is always compared so that what has no probability is never taken: u * q < p, strictly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

NONE = -1
"""No sibling; pads ragged rows."""


def choose(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """[A] token ids: the inverse distribution function of `weights` [A, V], of any positive sum, at `uniforms`; NONE
    where a row has no weight at all."""
    sums = weights.cumsum(1, dtype=torch.float64)
    totals = sums[:, -1]
    targets = torch.minimum(uniforms * totals, torch.nextafter(totals, torch.zeros_like(totals)))
    return torch.where(totals > 0, torch.searchsorted(sums, targets[:, None], right=True)[:, 0], NONE)


def try_siblings(p: torch.Tensor, q: torch.Tensor | None, tokens: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Recursive rejection: [A] index of the sibling that is accepted, or NONE; then row of `p` is what to draw from.

    `tokens` [A, C] are distinct siblings in the order in which they were drawn from `q` [A, V] without replacement,
    NONE behind the last; q None: they were not drawn, each was certain to be there (a one-hot proposal). `uniforms` is
    [A, C]. p and q are overwritten. With one sibling this is token-wise rejection sampling.
    """
    accepted = torch.full((len(p),), NONE)
    for sibling in range(tokens.shape[1]):
        waiting = torch.nonzero((accepted == NONE) & (tokens[:, sibling] != NONE))[:, 0]
        token = tokens[waiting, sibling]
        proposed = 1.0 if q is None else q[waiting, token].double()
        takes = uniforms[waiting, sibling] * proposed < p[waiting, token].double()
        accepted[waiting[takes]] = sibling
        rejected, token = waiting[~takes], token[~takes]
        if not len(rejected):
            continue
        if q is None:
            _replace(p, rejected, _without(p[rejected], token))
        else:
            tested = q[rejected]
            _replace(p, rejected, p[rejected].sub_(tested).clamp_(min=0.0))
            if sibling + 1 < tokens.shape[1]:
                _replace(q, rejected, _without(tested, token))
    return accepted


def _without(rows: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """`rows`, a copy already, with one entry each set to 0."""
    return rows.scatter_(1, token[:, None], 0.0)


def _replace(table: torch.Tensor, at: torch.Tensor, rows: torch.Tensor) -> None:
    """table[at] = rows, divided by their sums; a row that nothing but rounding left empty keeps what it had."""
    sums = rows.sum(1)
    if bool((sums <= 0).any()):
        at, rows, sums = at[sums > 0], rows[sums > 0], sums[sums > 0]
    table[at] = rows.div_(sums[:, None])


@dataclass(frozen=True, slots=True)
class BlockLevel:
    """Block verification after the first i drafted tokens (Sun et al., arXiv 2403.10444)."""

    threshold: torch.Tensor
    """[A] h_i: the walk may end here, or further down, when a uniform lies below it."""
    weights: torch.Tensor
    """[A, V]: what to draw from if it ends here."""
    weight: torch.Tensor
    """[A] w_{i+1}, for the next level."""


def block_level(p: torch.Tensor, q: torch.Tensor | None, weight: torch.Tensor, token: torch.Tensor) -> BlockLevel:
    """Level i from w_i = `weight` [A] float64, the distributions after i tokens and the drafted `token` [A] after them.

    q None: one-hot on the token.
    """
    scale = weight[:, None].to(p.dtype)
    rest = _without(p * scale, token) if q is None else (p * scale).sub_(q).clamp_(min=0.0)
    mass = rest.sum(1, dtype=torch.float64)
    below = mass + 1.0 - weight
    threshold = torch.where(below > 0, mass / below, 1.0)
    ratio = p.gather(1, token[:, None])[:, 0].double()
    if q is not None:
        ratio = ratio / q.gather(1, token[:, None])[:, 0].double()
    empty = torch.nonzero(mass <= 0)[:, 0]
    rest[empty] = p[empty]
    return BlockLevel(threshold, rest, torch.clamp(weight * ratio, max=1.0))


def is_typical(p: torch.Tensor, epsilon: float, delta: float) -> torch.Tensor:
    """[A, V] bool: p(x) > min(epsilon, delta * e^-H(p)), Medusa's typical acceptance (arXiv 2401.10774). Lossy."""
    entropy = torch.special.entr(p).sum(1, keepdim=True)
    return p > torch.clamp(delta * torch.exp(-entropy), max=epsilon)
