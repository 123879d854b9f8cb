"""From logits to the distribution that `kernels.sampling.draw` draws from: same temperature, same filters."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import carray

from workers.engine.kernels.cpu.filters import BINS, keep, mass_of, shift_of, token_of
from workers.engine.kernels.cpu.floats import LANES, exp, exp_all, find_max, pointer, total
from workers.engine.kernels.cpu.runtime import ARGUMENTS, TASKS, Kernel, claim, inlined
from workers.engine.kernels.cpu.sampling import ROW, shift_bfloat16, shift_float32, shift_float64


def weigh(dtype: torch.dtype, vocab: int, table: npt.NDArray[np.void]) -> tuple[torch.Tensor, npt.NDArray[np.float64]]:
    """Weights e^((logit - maximum) / temperature) of the tokens that pass the filters of each row of `table` (of type
    ROW), 0 elsewhere: [R, V] float32; and their sums [R], or MASKED or INVALID where there is nothing to draw from.
    """
    rows = len(table)
    weights, masses = torch.empty(rows, vocab), np.empty(rows)
    _WEIGH[dtype](rows, table.ctypes.data, vocab, weights.data_ptr(), masses.ctypes.data, numbers=rows * vocab)
    return weights, masses


@inlined
def _weigh_rows(block: Any, word: Any, infinity: Any, shift: Any) -> None:
    rows, vocab = block[TASKS], block[ARGUMENTS + 1]
    table = carray(pointer(block[ARGUMENTS]), (rows,), ROW)
    all_weights = carray(pointer(block[ARGUMENTS + 2]), (rows, vocab), np.float32)
    masses = carray(pointer(block[ARGUMENTS + 3]), (rows,), np.float64)
    shifts, scratch = np.empty(vocab, np.float32), np.empty(vocab, np.float32)
    ranks, edge = np.empty(vocab, np.uint64), np.empty(vocab, np.uint64)
    histogram, partial = np.empty(BINS), np.empty(LANES)
    index = claim(block)
    while index < rows:
        row, weights = table[index], all_weights[index]
        top = find_max(carray(pointer(row.address), (vocab,), word), word, infinity)
        # Negative: not a token, but the reason why there is none. The caller finds it as the mass.
        masses[index] = np.float64(top)
        if top < 0:
            weights[:] = np.float32(0)
        else:
            shift(row, vocab, top, shifts)
            if row.top_k > 0 or row.top_p < 1.0 or row.min_p > 0.0:
                kept = ranks[: keep(row, shifts, scratch, histogram, ranks, edge)]
                weights[:] = np.float32(0)
                for i in range(len(kept)):
                    weights[token_of(kept[i])] = exp(shift_of(kept[i]))
                masses[index] = mass_of(kept)
            else:
                exp_all(shifts, weights)
                masses[index] = total(weights, partial)
        index = claim(block)


def _weigh_bfloat16(block: Any) -> None:
    _weigh_rows(block, np.int16, 0x7F80, shift_bfloat16)


def _weigh_float32(block: Any) -> None:
    _weigh_rows(block, np.int32, 0x7F800000, shift_float32)


def _weigh_float64(block: Any) -> None:
    _weigh_rows(block, np.int64, 0x7FF0000000000000, shift_float64)


_WEIGH = {
    torch.bfloat16: Kernel(_weigh_bfloat16),
    torch.float32: Kernel(_weigh_float32),
    torch.float64: Kernel(_weigh_float64),
}
