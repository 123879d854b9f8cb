"""Linear layers of 8-bit weights and 8-bit activations, through oneDNN's own integer product.

Weights have one scale per output, activations one per row, measured as they come. Integer sums are exact, so a row's
value does not depend on the other rows. Processors without 8-bit dot products (VNNI, AMX) run it slowly and less
precisely.
"""

from __future__ import annotations

import torch
from torch import nn

from workers.engine.api.errors import UnsupportedModel
from workers.engine.kernels.cpu.quantise import ZERO, quantise_rows
from workers.engine.models.layers.linear import LAYOUTS, Linear

LARGEST = 127


class QuantisedLinear:
    """x [T, K] float32 or bfloat16 -> x W^T + b [T, N] of the same type, but for rounding to 8 bits."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        scales = weight.abs().amax(1, keepdim=True).float().clamp_(min=1e-30) / LARGEST
        codes = (weight.float() / scales).round_().to(torch.int8)
        self._weight = torch.ops.onednn.qlinear_prepack(codes, [LAYOUTS[0], weight.shape[1]])
        self._scales = scales[:, 0].contiguous()
        self._zeros = torch.zeros(len(scales), dtype=torch.int64)
        self._bias = bias
        self.nbytes = codes.nbytes + self._scales.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        codes, scales = quantise_rows(x)
        out: torch.Tensor = torch.ops.onednn.qlinear_pointwise.default(
            codes, 1.0, ZERO, self._weight, self._scales, self._zeros, None, 1.0, 0, x.dtype, "none", [], ""
        )
        out.mul_(scales)
        return out if self._bias is None else out.add_(self._bias)


AnyLinear = Linear | QuantisedLinear


def quantise(weights: list[torch.Tensor], biases: list[torch.Tensor] | None = None) -> QuantisedLinear:
    """One layer of several weights [N_i, K] and biases [N_i], side by side, like `linear.pack`."""
    return QuantisedLinear(torch.cat(weights), torch.cat(biases) if biases else None)


class QuantisedModule(nn.Module):
    """A quantised layer in the place of an `nn.Linear`."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        bias = None if linear.bias is None else linear.bias.detach()
        self.inner = QuantisedLinear(linear.weight.detach(), bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return self.inner(rows).view(*x.shape[:-1], -1)


def quantise_modules(model: nn.Module) -> list[QuantisedLinear]:
    """Replace every `nn.Linear` of a transformers model; returns what came in their places."""
    replaced = []
    for path, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            model.set_submodule(path, quantised := QuantisedModule(module))
            replaced.append(quantised.inner)
    return replaced


def check_int8(dtype: torch.dtype, device: torch.device, name: str) -> None:
    """Raise `UnsupportedModel` where there is no product of 8-bit matrices for activations of this type."""
    if device.type != "cpu":
        raise UnsupportedModel(f"draft {name}: draft_dtype int8 runs on the CPU, the model is on {device}")
    if dtype not in (torch.float32, torch.bfloat16):
        raise UnsupportedModel(f"draft {name}: draft_dtype int8 takes float32 and bfloat16 models, not {dtype}")
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        raise UnsupportedModel(f"draft {name}: draft_dtype int8 needs a torch with oneDNN")
