"""Rows of activations to 8 bits, each with a scale of its own, for products with 8-bit weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import carray

from workers.engine.kernels.cpu.floats import LANES, pointer, same, widen
from workers.engine.kernels.cpu.runtime import ARGUMENTS, TASKS, Kernel, claim, inlined, run_rows

ZERO = 128
"""The code of 0; the largest magnitude of a row becomes 1 or 255."""


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K], contiguous float32 or bfloat16 -> codes [T, K] uint8 and scales [T, 1] float32.

    x is scales * (codes - ZERO) but for rounding. The code of a number that is not finite means nothing.
    """
    rows, width = x.shape
    codes, scales = torch.empty((rows, width), dtype=torch.uint8), torch.empty((rows, 1), dtype=torch.float32)
    run_rows(_QUANTISE[x.dtype], rows, width, x.data_ptr(), codes.data_ptr(), scales.data_ptr())
    return codes, scales


@inlined
def _quantise(block: Any, word: Any, wide: Any) -> None:
    rows, each, width = block[ARGUMENTS], block[ARGUMENTS + 1], block[ARGUMENTS + 2]
    x = carray(pointer(block[ARGUMENTS + 3]), (rows, width), word)
    codes = carray(pointer(block[ARGUMENTS + 4]), (rows, width), np.uint8)
    scales = carray(pointer(block[ARGUMENTS + 5]), (rows,), np.float32)
    numbers, largest = np.empty(width, np.float32), np.empty(LANES, np.float32)
    whole = width // LANES * LANES
    task = claim(block)
    while task < block[TASKS]:
        for row in range(task * each, min(rows, (task + 1) * each)):
            for i in range(width):
                numbers[i] = wide(x[row, i])
            largest[:] = np.float32(0.0)
            for start in range(0, whole, LANES):
                for lane in range(LANES):
                    size = abs(numbers[start + lane])
                    largest[lane] = size if size > largest[lane] else largest[lane]
            top = np.float32(1e-30)
            for i in range(whole, width):
                top = max(top, abs(numbers[i]))
            for lane in range(LANES):
                top = max(top, largest[lane])
            scales[row] = top / np.float32(127.0)
            factor = np.float32(127.0) / top
            for i in range(width):
                codes[row, i] = np.uint8(np.int32(numbers[i] * factor + np.float32(ZERO + 0.5)))
        task = claim(block)


def _quantise_float32(block: Any) -> None:
    _quantise(block, np.float32, same)


def _quantise_bfloat16(block: Any) -> None:
    _quantise(block, np.uint16, widen)


_QUANTISE = {torch.float32: Kernel(_quantise_float32), torch.bfloat16: Kernel(_quantise_bfloat16)}
