"""In which numbers a model, heads or a draft layer run: type of activations, device, and how weights are kept.

A new kind of quantised weights is a member of `Weights` and its layers here; what loads models hands the value on.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import nn

from workers.engine.api.config import SpeculationConfig
from workers.engine.api.errors import UnsupportedModel
from workers.engine.models.layers.linear import Linear, pack
from workers.engine.models.layers.quantised import AnyLinear, check_int8, quantise, quantise_modules

CPU = torch.device("cpu")


class Weights(StrEnum):
    """How the matrices of linear layers are kept."""

    WHOLE = "whole"
    """In the type of the activations."""
    INT8 = "int8"


@dataclass(frozen=True, slots=True)
class Precision:
    """Type and device of activations and of all weights but those that `weights` says more about."""

    dtype: torch.dtype = torch.float32
    device: torch.device = CPU
    weights: Weights = Weights.WHOLE

    def __str__(self) -> str:
        return str(self.dtype).removeprefix("torch.") if self.is_whole else str(self.weights)

    @property
    def is_whole(self) -> bool:
        """Whether no weights are quantised."""
        return self.weights is Weights.WHOLE

    def ready(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device, self.dtype)

    def linear(self, weights: list[torch.Tensor], biases: list[torch.Tensor] | None = None) -> AnyLinear:
        """One layer of several weights [N_i, K] and biases [N_i], side by side."""
        return (pack if self.is_whole else quantise)(weights, biases)

    def quantise_modules(self, model: nn.Module) -> int:
        """Quantise the `nn.Linear`s of a transformers model in place, if any are to be; the bytes that they take."""
        return 0 if self.is_whole else sum(linear.nbytes for linear in quantise_modules(model))

    def check(self, name: str) -> None:
        """Raise `UnsupportedModel`, naming the draft, where there are no products for weights kept like this."""
        if not self.is_whole:
            check_int8(self.dtype, self.device, name)

    def check_model(self, model: Any, name: str) -> None:
        """`check`, for a transformers model of that name: it must have layers that can be quantised."""
        self.check(name)
        if not self.is_whole and not any(type(module) is nn.Linear for module in model.modules()):
            kind = f"draft {name} ({model.config.model_type})"
            raise UnsupportedModel(f"{kind} has no linear layers that {self.weights} could change")


class Trainable(Precision):
    """Weights as autograd knows them, laid out for no kernel: gradients reach the tensors that a layer was made of."""

    def linear(self, weights: list[torch.Tensor], biases: list[torch.Tensor] | None = None) -> AnyLinear:
        weight = torch.cat(weights)
        return Linear(weight, torch.cat(biases) if biases else None, most=0, nbytes=weight.nbytes)


class Unread(Precision):
    """Looks at names and shapes alone: tensors stay in their file, and what is made of them cannot run."""

    def ready(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def linear(self, weights: list[torch.Tensor], biases: list[torch.Tensor] | None = None) -> AnyLinear:
        return Linear(weights[0], None, most=0, nbytes=0)


def choose_precision(speculation: SpeculationConfig, dtype: torch.dtype, device: torch.device) -> Precision:
    """What `draft_dtype` says for a draft whose target is of `dtype`.

    Raises `UnsupportedModel` where there is no product of quantised matrices.
    """
    wanted = speculation.draft_dtype
    if wanted is None:
        return Precision(dtype, device)
    if wanted not in set(Weights):
        return Precision(getattr(torch, wanted), device)
    precision = Precision(dtype, device, Weights(wanted))
    precision.check(str(speculation.draft))
    return precision
