"""Linear layers with weights laid out once for the matrix kernels.

oneDNN reads weights in a blocked layout and otherwise rearranges them on every call: with prepacked weights a small
bfloat16 product takes half the time, and float32, which torch gives to another library, a third.

A row's bits must not depend on how many rows there are. oneDNN chooses a kernel by that number: on AVX-512 all
sum in one order from two rows on; on AMX some split the sum. So `row_counts` tries every shape there once a process,
and a product only has numbers of rows that were seen to agree.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn
from torch.nn.functional import linear

LAYOUTS = (16, 1, 64)
"""oneDNN chooses the layout for a row count; 16 was best or near it from 1 to 512 rows."""
BLOCK = 128
"""Rows of one product where only few rows agree."""
LARGE = (129, 161, 200, 257, 320, 385, 512, 601, 1024)
VOCABULARY = (2, 3, 5, 8, 16, 17, 31, 32, 33, 48, 64, 65, 97, BLOCK)
ANY = sys.maxsize


@dataclass(frozen=True, slots=True)
class RowCounts:
    """How one weight is laid out, and the rows that a product with it may have: from 2 to `most`."""

    layout: int
    most: int


@cache
def row_counts(n: int, k: int, dtype: torch.dtype, threads: int) -> RowCounts:
    """Numbers of rows at which the product by a weight [n, k] gives a row the same bits.

    On AMX single counts stand out (33 rows, by a weight [576, 1536] in layout 16), so they are tried one by one, on a
    weight that is made up. `threads` is part of the question, since oneDNN may share out a sum over them. Where nothing
    agrees any number is taken: the self-test at load (`loading.invariance`) then says so.
    """
    if dtype is not torch.bfloat16 or not torch.cpu._is_amx_tile_supported():
        return RowCounts(LAYOUTS[0], ANY)
    trial = cache(lambda layout: _Trial(n, k, dtype, layout))
    # A vocabulary's product takes a hundred times as long as a layer's: a sample has to do.
    few, large = (range(2, BLOCK + 1), LARGE) if n < 16_384 else (VOCABULARY, LARGE[:3])
    for most, counts in ((ANY, (*few, *large)), (BLOCK, few), (32, [count for count in few if count <= 32])):
        for layout in LAYOUTS:
            if all(map(trial(layout).agrees, counts)):
                return RowCounts(layout, most)
    return RowCounts(LAYOUTS[0], ANY)


class _Trial:
    """Products of one made-up weight by different numbers of rows."""

    def __init__(self, n: int, k: int, dtype: torch.dtype, layout: int) -> None:
        self.layout = layout
        generator = torch.Generator().manual_seed(n)
        weight = torch.randn(min(n, 509), k, generator=generator).to(dtype)  # repeated: making noise is slow
        self._weight = _reordered(weight.repeat(-(-n // len(weight)), 1)[:n], layout)
        self._x = torch.randn(max(LARGE), k, generator=generator).to(dtype)
        self._known: dict[int, bool] = {}
        self._rows = torch.cat([_product(self._x[i : i + 2], self._weight, None) for i in range(0, 16, 2)])

    def agrees(self, count: int) -> bool:
        """Whether rows have the same bits among `count` as in pairs."""
        if count not in self._known:
            result = _product(self._x[:count], self._weight, None)
            while len(self._rows) < count:  # in pairs it would take long: 16, then BLOCK rows, which were compared
                size = 16 if len(self._rows) < BLOCK else BLOCK
                following = self._x[len(self._rows) :][:size]
                self._rows = torch.cat([self._rows, _product(following, self._weight, None)])
            self._known[count] = torch.equal(result, self._rows[:count])
        return self._known[count]


def _reordered(weight: torch.Tensor, layout: int) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), layout)
    return packed


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return result


@dataclass(frozen=True, slots=True)
class Linear:
    """x [T, K] -> x W^T + b [T, N]."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    most: int
    """Rows of one product at most; 0: the weight is not packed."""
    nbytes: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self.most:
            return linear(x, self.weight, self.bias)
        rows = x.numel() // x.shape[-1]
        if rows == 1:
            # A lone row would go to a kernel for vectors, which sums in another order.
            return self(torch.cat([x, x], -2))[..., :1, :] if x.dim() > 1 else self(x[None])[0]
        if rows <= self.most:
            return _product(x, self.weight, self.bias)
        return self._in_blocks(x.reshape(rows, -1)).view(*x.shape[:-1], -1)

    def _in_blocks(self, x: torch.Tensor) -> torch.Tensor:
        starts = range(0, len(x), self.most)
        # The last block goes back a row if it had but one.
        parts = [x[min(start, len(x) - 2) :][: self.most] for start in starts]
        done = [_product(part, self.weight, self.bias) for part in parts]
        done[-1] = done[-1][starts[-1] - len(x) :]
        return torch.cat(done)


def pack(weights: list[torch.Tensor], biases: list[torch.Tensor] | None = None) -> Linear:
    """One layer of several weights [N_i, K] and biases [N_i], side by side. The caller may drop them afterwards."""
    weight = torch.cat(weights) if len(weights) > 1 else weights[0].detach()
    bias = torch.cat(biases) if biases else None
    nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)
    if not can_pack(weight):
        return Linear(weight.contiguous(), bias, 0, nbytes)
    counts = row_counts(*weight.shape, weight.dtype, torch.get_num_threads())
    return Linear(_reordered(weight, counts.layout), bias, counts.most, nbytes)


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
    """Replace every plain linear layer of a transformers model that gains from it."""
    from transformers.pytorch_utils import Conv1D  # takes seconds, which a scripted model need not wait for

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
