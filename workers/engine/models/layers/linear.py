"""Linear layers with weights laid out once for the matrix kernels.

oneDNN reads weights in a blocked layout and otherwise rearranges them on every call: with prepacked weights a small
bfloat16 product takes half the time, and float32, which torch gives to another library, a third.

A row's bits must not depend on how many rows there are. oneDNN chooses a kernel by that number: on AVX-512 all
sum in one order from two rows on; on AMX some split the sum. So `row_counts` tries every shape there once a process,
and a product only has numbers of rows that were seen to agree.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn
from torch.nn.functional import linear

LAYOUTS = (16, 1, 64)
"""oneDNN chooses the layout for a row count; 16 was best or near it from 1 to 512 rows."""
SMALL, FEW, MANY = 4_000_000, 128, 512
"""Up to MANY numbers of rows are tried by a weight of at most SMALL numbers, else up to FEW: trying must stay short."""
VOCABULARY = 16_384
"""From so many outputs on a weight is one of a vocabulary, and a sample has to do: one product takes milliseconds."""
SAMPLE = (2, 3, 5, 8, 16, 17, 31, 32, 33, 48, 64, 65, 97, 128, 129, 160, 161, 192, 200, 256, 257, 384, MANY)
ANY = sys.maxsize


@dataclass(frozen=True, slots=True)
class RowCounts:
    """How one weight is laid out, and the rows that a product with it may have: from 2 to `most`."""

    layout: int
    most: int


@cache
def row_counts(n: int, k: int, dtype: torch.dtype, threads: int) -> RowCounts:
    """Numbers of rows at which the product by a weight [n, k] gives a row the same bits.

    On AMX single numbers stand out (160 and 200 rows, but not 161, by a weight [576, 1536] in layout 1), so they are
    tried one by one, on a weight that is made up; the layout that agrees up to the most rows is taken. `threads` is
    part of the question, since oneDNN may share out a sum over them. Where not even 2 and 3 rows agree any number is
    taken: the self-test at load (`loading.invariance`) then says so.
    """
    if dtype is not torch.bfloat16 or not torch.cpu._is_amx_tile_supported():
        return RowCounts(LAYOUTS[0], ANY)
    counts = SAMPLE if n >= VOCABULARY else range(2, 1 + (MANY if n * k <= SMALL else FEW))
    most, layout = max(
        ((_most_agreeing(n, k, dtype, layout, counts), layout) for layout in LAYOUTS), key=lambda found: found[0]
    )
    return RowCounts(layout, most) if most > 2 else RowCounts(LAYOUTS[0], ANY)


def _most_agreeing(n: int, k: int, dtype: torch.dtype, layout: int, counts: Sequence[int]) -> int:
    """The last of the rising `counts` up to which rows have the same bits as in pairs, in this layout."""
    generator = torch.Generator().manual_seed(n)
    weight = torch.randn(min(n, 509), k, generator=generator).to(dtype)  # repeated: making noise is slow
    weight = _reordered(weight.repeat(-(-n // len(weight)), 1)[:n], layout)
    x = torch.randn(counts[-1], k, generator=generator).to(dtype)
    known = _product(x[:2], weight, None)
    agreeing = 2
    for count in counts:
        while len(known) < count:
            step = 2 if len(known) < 16 else 16  # by then 16 rows were compared with pairs
            known = torch.cat([known, _product(x[len(known) :][:step], weight, None)])
        if not torch.equal(_bits(_product(x[:count], weight, None)), _bits(known[:count])):
            break
        agreeing = count
    return agreeing


def _bits(rows: torch.Tensor) -> torch.Tensor:
    """Four numbers at a time where they come in fours: quicker to compare."""
    return rows.view(torch.int64 if rows.shape[-1] % 4 == 0 else torch.int16)


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
