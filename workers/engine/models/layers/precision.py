"""In which precision heads and draft layers run: `draft_dtype`, or the target's."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workers.engine.api.config import SpeculationConfig
from workers.engine.models.layers.linear import Linear, pack
from workers.engine.models.layers.quantised import AnyLinear, check_int8, quantise

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Precision:
    """Type and place of activations and weights; with `int8` those of linear layers are 8-bit."""

    dtype: torch.dtype = torch.float32
    device: torch.device = CPU
    int8: bool = False

    def __str__(self) -> str:
        return "int8" if self.int8 else str(self.dtype).removeprefix("torch.")

    def ready(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device, self.dtype)

    def linear(self, weights: list[torch.Tensor], biases: list[torch.Tensor] | None = None) -> AnyLinear:
        """One layer of several weights, side by side."""
        return (quantise if self.int8 else pack)(weights, biases)


class Unread(Precision):
    """Looks at names and shapes alone: tensors stay in their file, and what is made of them cannot run."""

    def ready(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def linear(self, weights: list[torch.Tensor], biases: list[torch.Tensor] | None = None) -> AnyLinear:
        return Linear(weights[0], None, most=0, nbytes=0)


def choose_precision(speculation: SpeculationConfig, dtype: torch.dtype, device: torch.device) -> Precision:
    """What `draft_dtype` says for a draft whose target is of `dtype`.

    Raises `UnsupportedModel` where there is no product of 8-bit matrices.
    """
    wanted = speculation.draft_dtype
    if wanted is None:
        return Precision(dtype, device)
    if wanted != "int8":
        return Precision(getattr(torch, wanted), device)
    check_int8(dtype, device, str(speculation.draft))
    return Precision(dtype, device, int8=True)
