"""Linear layers with weights laid out once for the matrix kernels.

oneDNN reads weights in a blocked layout and otherwise rearranges them on every call: with prepacked weights a small
bfloat16 product takes half the time, and float32, which torch gives to another library, a third. Prepacked products of
two rows and more are also the same bit for bit whatever the number of rows, which float32 products of torch are not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

PACKED_FOR_ROWS = 16
"""oneDNN chooses the layout for a row count; this one was best or near it from 1 to 512 rows."""


@dataclass(frozen=True, slots=True)
class Linear:
    """x [T, K] -> x W^T + b [T, N]."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    packed: bool
    nbytes: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed:
            if x.numel() == x.shape[-1]:
                # A lone row would go to a kernel for vectors, which sums in another order.
                return self(torch.cat([x, x], -2))[..., :1, :] if x.dim() > 1 else self(x[None])[0]
            result: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "none", [], "")
            return result
        return linear(x, self.weight, self.bias)


def pack(weights: list[torch.Tensor], biases: list[torch.Tensor] | None = None) -> Linear:
    """One layer of several weights [N_i, K] and biases [N_i], side by side. The caller may drop them afterwards."""
    weight = torch.cat(weights) if len(weights) > 1 else weights[0].detach()
    bias = torch.cat(biases) if biases else None
    nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)
    if not can_pack(weight):
        return Linear(weight.contiguous(), bias, False, nbytes)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_FOR_ROWS)
    return Linear(packed, bias, True, nbytes)


class PackedLinear(nn.Module):
    """A `Linear` in the place of a transformers module."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self._linear = pack([weight.detach()], None if bias is None else [bias.detach()])
        self.weight = weight.detach().to("meta")
        """Shape and type, for models that ask their layers; the numbers are laid out for the product alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear(x)


def pack_modules(model: nn.Module) -> None:
    """Replace every plain linear layer of a model that gains from it."""
    for name, module in list(model.named_modules()):
        if type(module) in (nn.Linear, Conv1D) and can_pack(module.weight):
            weight = module.weight if type(module) is nn.Linear else module.weight.t()
            model.set_submodule(name, PackedLinear(weight, module.bias))


def can_pack(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype is torch.float32
