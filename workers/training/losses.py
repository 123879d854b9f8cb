"""How far a drafter's distribution is from the target's. All are means over rows, in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Draft's logits [R, V] and the target's probabilities [R, V] -> the loss of each row, [R]."""


class _SoftCrossEntropy(torch.autograd.Function):
    """The gradient is softmax(logits) - target: made on the way, in the logits' own type, it need not be made again."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        wide = logits.float()
        sums = torch.logsumexp(wide, dim=-1, keepdim=True)
        loss: torch.Tensor = sums[:, 0] - torch.linalg.vecdot(wide, target)
        ctx.save_for_backward((wide - sums).exp_().sub_(target).to(logits.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (difference,) = ctx.saved_tensors
        return difference * grad[:, None].to(difference.dtype), None


def soft_cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Forward KL up to a constant: its gradient is that of KL(target || draft)."""
    loss: torch.Tensor = _SoftCrossEntropy.apply(logits, target)  # type: ignore[no-untyped-call]
    return loss


def reverse_kl(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """KL(draft || target); a target's zero counts as the smallest float."""
    logs = logits.float().log_softmax(-1)
    return (logs.exp() * (logs - _log(target))).sum(-1)


def jensen_shannon(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    logs = logits.float().log_softmax(-1)
    middle = _log((logs.exp() + target) / 2)
    return ((logs.exp() * (logs - middle)).sum(-1) + (target * (_log(target) - middle)).sum(-1)) / 2


def total_variation(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """1 - acceptance under the rules that accept as often as can be."""
    return (logits.float().softmax(-1) - target).abs().sum(-1) / 2


def adaptive(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """w KL + (1 - w) TV with w = exp(-3 acceptance): KL while they hardly overlap, where TV has no gradient
    (arXiv 2602.23881)."""
    tv = total_variation(logits, target)
    weight = torch.exp(-3 * (1 - tv.detach()))
    return weight * soft_cross_entropy(logits, target) + (1 - weight) * tv


LOSSES: dict[str, Loss] = {
    "kl": soft_cross_entropy,
    "reverse_kl": reverse_kl,
    "jsd": jensen_shannon,
    "tv": total_variation,
    "adaptive": adaptive,
}


def _log(p: torch.Tensor) -> torch.Tensor:
    return p.clamp_min(torch.finfo(p.dtype).tiny).log()
