"""Mixtures of experts with prepacked weights: each row goes through its own experts, whoever else is in the batch.

transformers keeps the weights of a layer's experts in one tensor and multiplies groups of rows by its slices; in
float32 the number of rows in a group shows in the bits of the result. Here every expert is a `Linear`, and a row's
shares are added in the order of its own routing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from workers.engine.models.layers.linear import Linear, can_pack, pack


class PackedExperts:
    """In the place of the forward function of a module that transformers' `use_experts_implementation` has decorated.

    Takes the weights out of the module; its gate, activation and norm stay in use.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self._dtype: torch.dtype = module.down_proj.dtype
        self._up = _take(module, "gate_up_proj" if module.has_gate else "up_proj")
        self._down = _take(module, "down_proj")

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[T, N] states, [T, k] experts and their weights -> [T, N]."""
        choices = top_k_index.shape[-1]
        experts = top_k_index.reshape(-1)
        order = experts.argsort(stable=True)
        counts = torch.bincount(experts, minlength=len(self._down)).tolist()
        inner = _multiply(hidden_states[order // choices].to(self._dtype), self._up, counts)
        gated = self._module._apply_gate(inner) if self._module.has_gate else self._module.act_fn(inner)
        outer = _multiply(gated, self._down, counts)
        if self._module.has_post_expert_norm:
            outer = self._module.post_expert_norm(outer)
        weighted = outer * top_k_weights.reshape(-1)[order, None]
        shares = torch.empty_like(weighted)
        shares[order] = weighted
        return shares.view(*top_k_index.shape, -1).sum(1).to(hidden_states.dtype)


def pack_experts(model: nn.Module) -> None:
    """Give every layer of experts of a model that can be packed its own weights in packed form."""
    for module in model.modules():
        weight = getattr(module, "down_proj", None)
        if hasattr(module, "_is_expert_parallel") and isinstance(weight, torch.Tensor) and can_pack(weight):
            setattr(module, "forward", PackedExperts(module))  # noqa: B010 (mypy knows forward as a method)


def _take(module: Any, name: str) -> list[Linear]:
    """One `Linear` for each expert."""
    weights = getattr(module, name).detach()
    biases = getattr(module, f"{name}_bias").detach() if module.has_bias else None
    if module.is_transposed:
        weights = weights.transpose(1, 2)
    linears = [pack([weight], None if biases is None else [biases[i]]) for i, weight in enumerate(weights)]
    delattr(module, name)
    return linears


def _multiply(rows: torch.Tensor, linears: list[Linear], counts: list[int]) -> torch.Tensor:
    """Rows sorted by expert, each through its own; those of no expert (padded routing) give zeros."""
    parts = torch.split_with_sizes(rows, [*counts[: len(linears)], sum(counts[len(linears) :])])
    products = [linear(part) for linear, part in zip(linears, parts, strict=False) if len(part)]
    if len(parts[-1]):
        products.append(rows.new_zeros(len(parts[-1]), linears[0].weight.shape[0]))
    return torch.cat(products)
