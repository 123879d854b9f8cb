"""Exact or strictly ordered arithmetic on a row of numbers, for use inside kernels.

A *level* is a number's bit pattern turned into an integer of the same order (-0 and 0 coincide). The maximum of
integers is the same in any order of comparison, so the compiler may vectorise it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.core import cgutils, types

from workers.engine.kernels.cpu.runtime import inlined, operation
from workers.engine.state.drawn import INVALID, MASKED

BLOCK = 1024
LANES = 32
"""Partial sums of a row. Part of the definition of the result."""


@operation(types.voidptr, types.int64)
def pointer(builder: Any, address: Any) -> Any:
    """An address as something that `carray` takes."""
    return builder.inttoptr(address, cgutils.voidptr_t)


@inlined
def level(bits: Any, word: Any) -> Any:
    """Bits of a floating-point number, as signed integer type `word` -> its level. NaN lies beyond the infinities."""
    ordered = word(bits ^ ((bits >> word(np.iinfo(word).bits - 1)) & word(np.iinfo(word).max)))
    return word(ordered - (ordered >> word(np.iinfo(word).bits - 1)))


@inlined
def max_level(bits: Any, word: Any) -> Any:
    highest = level(bits[0], word)
    for i in range(len(bits)):
        highest = max(highest, level(bits[i], word))
    return highest


@inlined
def _min_level(bits: Any, word: Any) -> Any:
    lowest = level(bits[0], word)
    for i in range(len(bits)):
        lowest = min(lowest, level(bits[i], word))
    return lowest


@inlined
def find_max(bits: Any, word: Any, infinity: Any) -> Any:
    """Index of the first largest number, or MASKED or INVALID. `infinity` is the bit pattern of +inf."""
    highest = lowest = level(bits[0], word)
    where = 0
    for start in range(0, len(bits), BLOCK):
        part = bits[start : min(start + BLOCK, len(bits))]
        lowest = min(lowest, _min_level(part, word))
        high = max_level(part, word)
        if high > highest:
            highest, where = high, start
    top = level(word(infinity), word)
    if highest >= top or lowest < -top:
        return INVALID
    if highest == -top:
        return MASKED
    while level(bits[where], word) != highest:
        where += 1
    return where


@inlined
def exp(x: Any) -> Any:
    """e**x in float32 for x <= 0, within 2 ulp; exactly 1 at 0, and 0 below -87 (Cephes expf, without branches)."""
    bounded = max(x, np.float32(-87.0))
    whole = bounded * np.float32(1.44269504088896341) + np.float32(12582912.0) - np.float32(12582912.0)
    r = bounded - whole * np.float32(0.693359375) - whole * np.float32(-2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * (r * r) + r + np.float32(1.0)
    power = np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)
    return p * power if x >= np.float32(-87.0) else np.float32(0.0)


@inlined
def exp_all(numbers: Any, out: Any) -> None:
    for i in range(len(numbers)):
        out[i] = exp(numbers[i])


@inlined
def total(numbers: Any, partial: Any) -> Any:
    """Sum in float64, by lanes (`partial`, LANES float64) so that it vectorises."""
    partial[:] = 0.0
    whole = len(numbers) // LANES * LANES
    for start in range(0, whole, LANES):
        for lane in range(LANES):
            partial[lane] += np.float64(numbers[start + lane])
    result = 0.0
    for lane in range(LANES):
        result += partial[lane]
    for i in range(whole, len(numbers)):
        result += np.float64(numbers[i])
    return result


@inlined
def same(number: Any) -> Any:
    """A float32 as it is: beside `widen`, for kernels of either type."""
    return number


@inlined
def widen(number: Any) -> Any:
    """Bits of a bfloat16 -> float32."""
    return np.uint32(np.uint32(number) << np.uint32(16)).view(np.float32)
