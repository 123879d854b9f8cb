"""Distances between distributions, against their definitions."""

from __future__ import annotations

import pytest
import torch

from workers.training.losses import LOSSES


def definition(name: str, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """p is the target's, q the draft's."""
    kl, reverse = (p * (p / q).log()).sum(-1), (q * (q / p).log()).sum(-1)
    middle, tv = (p + q) / 2, (p - q).abs().sum(-1) / 2
    if name == "jsd":
        return ((p * (p / middle).log()).sum(-1) + (q * (q / middle).log()).sum(-1)) / 2
    weight = torch.exp(-3 * (1 - tv.detach()))
    return {"kl": kl, "reverse_kl": reverse, "tv": tv, "adaptive": weight * kl + (1 - weight) * tv}[name]


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_those_of_the_definition(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(6, 40, generator=generator).mul(2).softmax(-1)
    logits = torch.randn(6, 40, generator=generator).requires_grad_()
    weights = torch.rand(6, generator=generator)
    (LOSSES[name](logits, target) * weights).sum().backward()
    other = logits.detach().clone().requires_grad_()
    (definition(name, target, other.softmax(-1)) * weights).sum().backward()
    assert logits.grad is not None
    assert other.grad is not None
    torch.testing.assert_close(logits.grad, other.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_zeros_of_the_target_and_sure_drafts_give_numbers(name: str) -> None:
    target = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]])
    logits = torch.tensor([[200.0, -200.0, 0.0], [-300.0, 0.0, 300.0]]).requires_grad_()
    loss = LOSSES[name](logits, target)
    loss.sum().backward()
    assert bool(torch.isfinite(loss).all())
    assert logits.grad is not None
    assert bool(torch.isfinite(logits.grad).all())
