"""What lies between the matrix products of a Llama layer: norm, rotation and cache write, gated activation.

Every row is computed on its own, in an order that its width alone fixes. Numbers are rounded where transformers rounds
them, after each of its tensor operations, so bfloat16 results differ from its own by the order of a norm's sum alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray

from workers.engine.kernels.cpu.floats import LANES, exp, pointer, same, widen
from workers.engine.kernels.cpu.runtime import ARGUMENTS, TASKS, Kernel, claim, inlined, run_rows


def add_norm(
    residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, out: torch.Tensor
) -> None:
    """residual += delta; out = weight * residual / rms(residual). All [T, N] and contiguous, weight [N]; one dtype."""
    rows, width = residual.shape
    run_rows(
        _ADD_NORM[residual.dtype], rows, width, _bits(eps), residual.data_ptr(),
        0 if delta is None else delta.data_ptr(), weight.data_ptr(), out.data_ptr(),
    )  # fmt: skip


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """out = silu(gate) * up. gate_up [T, 2N] holds gate and up side by side, out is [T, N]; contiguous, one dtype."""
    rows, width = out.shape
    run_rows(_SILU_MUL[out.dtype], rows, width, gate_up.data_ptr(), out.data_ptr())


@dataclass(frozen=True, slots=True)
class Rotation:
    """What the heads of all layers share."""

    heads: int
    kv_heads: int
    width: int
    """Head dimension."""
    cos: torch.Tensor
    """[positions, width], contiguous, in the model's dtype; likewise sin."""
    sin: torch.Tensor


def rotate_and_cache(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    rotation: Rotation,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    keys: torch.Tensor,
    values: torch.Tensor,
) -> None:
    """Rotate the queries of qkv [T, (heads + 2 * kv_heads) * width] in place; put keys (rotated) and values into slots.

    positions and slots are [T] int64, keys and values one layer's contiguous [slots, kv_heads, width]. `norms` are the
    RMS norm weights of query and key heads, [width] each, applied before the rotation.
    """
    rows, total = qkv.shape
    q_norm, k_norm = (weight.data_ptr() for weight in norms) if norms else (0, 0)
    run_rows(
        _ROTATE[qkv.dtype], rows, total, _bits(eps), qkv.data_ptr(), positions.data_ptr(), slots.data_ptr(),
        rotation.heads, rotation.kv_heads, rotation.width, rotation.cos.data_ptr(), rotation.sin.data_ptr(),
        len(rotation.cos), q_norm, k_norm, keys.data_ptr(), values.data_ptr(), len(keys),
    )  # fmt: skip


@cache
def _bits(number: float) -> int:
    return int(np.float32(number).view(np.int32))


# Numbers of either type: `word` as stored, float32 to compute --------------------------------------------------------


@inlined
def _narrow(number: Any) -> Any:
    """Round to the nearest bfloat16, ties to even; NaN stays NaN."""
    bits = np.float32(number).view(np.uint32)
    odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    rounded = np.uint16(np.uint32(np.uint32(bits + odd) + np.uint32(0x7FFF)) >> np.uint32(16))
    return rounded if number == number else np.uint16(0x7FC0)


@inlined
def _inverse_rms(squares: Any, width: Any, eps: Any) -> Any:
    """Of a row whose squares were summed by lanes."""
    half = LANES // 2
    while half:
        for lane in range(half):
            squares[lane] += squares[lane + half]
        half //= 2
    return np.float32(1.0) / np.float32(math.sqrt(squares[0] / np.float32(width) + eps))


@inlined
def _add_squares(numbers: Any, squares: Any) -> None:
    squares[:] = np.float32(0.0)
    whole = len(numbers) // LANES * LANES
    for start in range(0, whole, LANES):
        for lane in range(LANES):
            squares[lane] += numbers[start + lane] * numbers[start + lane]
    for i in range(whole, len(numbers)):
        squares[i - whole] += numbers[i] * numbers[i]


@inlined
def _float(bits: Any) -> Any:
    return np.int32(bits).view(np.float32)


# Kernels. Arguments: rows, rows per task, width, then the function's own ---------------------------------------------


@inlined
def _add_norm(block: Any, word: Any, wide: Any, narrow: Any) -> None:
    rows, each, width = block[ARGUMENTS], block[ARGUMENTS + 1], block[ARGUMENTS + 2]
    eps = _float(block[ARGUMENTS + 3])
    residual = carray(pointer(block[ARGUMENTS + 4]), (rows, width), word)
    delta = carray(pointer(block[ARGUMENTS + 5]), (rows, width), word)
    weight = carray(pointer(block[ARGUMENTS + 6]), (width,), word)
    out = carray(pointer(block[ARGUMENTS + 7]), (rows, width), word)
    numbers, squares = np.empty(width, np.float32), np.empty(LANES, np.float32)
    task = claim(block)
    while task < block[TASKS]:
        for row in range(task * each, min(rows, (task + 1) * each)):
            if block[ARGUMENTS + 5]:
                for i in range(width):
                    residual[row, i] = narrow(wide(residual[row, i]) + wide(delta[row, i]))
            for i in range(width):
                numbers[i] = wide(residual[row, i])
            _add_squares(numbers, squares)
            factor = _inverse_rms(squares, width, eps)
            for i in range(width):
                out[row, i] = narrow(wide(weight[i]) * wide(narrow(numbers[i] * factor)))
        task = claim(block)


@inlined
def _silu_mul(block: Any, word: Any, wide: Any, narrow: Any) -> None:
    rows, each, width = block[ARGUMENTS], block[ARGUMENTS + 1], block[ARGUMENTS + 2]
    gate_up = carray(pointer(block[ARGUMENTS + 3]), (rows, 2, width), word)
    out = carray(pointer(block[ARGUMENTS + 4]), (rows, width), word)
    one = np.float32(1.0)
    task = claim(block)
    while task < block[TASKS]:
        for row in range(task * each, min(rows, (task + 1) * each)):
            for i in range(width):
                gate = wide(gate_up[row, 0, i])
                decay = exp(-abs(gate))
                share = (one if gate >= np.float32(0.0) else decay) / (one + decay)
                out[row, i] = narrow(wide(narrow(gate * share)) * wide(gate_up[row, 1, i]))
        task = claim(block)


@inlined
def _rotate_head(head: Any, cos: Any, sin: Any, out: Any, wide: Any, narrow: Any) -> None:
    """Both halves of a head; `out` may be `head`."""
    half = len(head) // 2
    for i in range(half):
        low, high = wide(head[i]), wide(head[half + i])
        turned_low = narrow(wide(narrow(low * wide(cos[i]))) + wide(narrow(-high * wide(sin[i]))))
        turned_high = narrow(wide(narrow(high * wide(cos[half + i]))) + wide(narrow(low * wide(sin[half + i]))))
        out[i] = turned_low
        out[half + i] = turned_high


@inlined
def _norm_head(head: Any, weight: Any, eps: Any, numbers: Any, squares: Any, wide: Any, narrow: Any) -> None:
    for i in range(len(head)):
        numbers[i] = wide(head[i])
    _add_squares(numbers, squares)
    factor = _inverse_rms(squares, len(head), eps)
    for i in range(len(head)):
        head[i] = narrow(wide(weight[i]) * wide(narrow(numbers[i] * factor)))


@inlined
def _rotate(block: Any, word: Any, wide: Any, narrow: Any) -> None:
    rows, each, eps = block[ARGUMENTS], block[ARGUMENTS + 1], _float(block[ARGUMENTS + 3])
    heads, kv_heads, width = block[ARGUMENTS + 7], block[ARGUMENTS + 8], block[ARGUMENTS + 9]
    table, pool = (block[ARGUMENTS + 12], width), (block[ARGUMENTS + 17], kv_heads, width)
    qkv = carray(pointer(block[ARGUMENTS + 4]), (rows, heads + 2 * kv_heads, width), word)
    positions = carray(pointer(block[ARGUMENTS + 5]), (rows,), np.int64)
    slots = carray(pointer(block[ARGUMENTS + 6]), (rows,), np.int64)
    cos, sin = carray(pointer(block[ARGUMENTS + 10]), table, word), carray(pointer(block[ARGUMENTS + 11]), table, word)
    q_norm = carray(pointer(block[ARGUMENTS + 13]), (width,), word)
    k_norm = carray(pointer(block[ARGUMENTS + 14]), (width,), word)
    keys = carray(pointer(block[ARGUMENTS + 15]), pool, word)
    values = carray(pointer(block[ARGUMENTS + 16]), pool, word)
    numbers, squares = np.empty(width, np.float32), np.empty(LANES, np.float32)
    task = claim(block)
    while task < block[TASKS]:
        for row in range(task * each, min(rows, (task + 1) * each)):
            place, slot = positions[row], slots[row]
            for head in range(heads + kv_heads):
                if block[ARGUMENTS + 13]:
                    weight = q_norm if head < heads else k_norm
                    _norm_head(qkv[row, head], weight, eps, numbers, squares, wide, narrow)
                out = qkv[row, head] if head < heads else keys[slot, head - heads]
                _rotate_head(qkv[row, head], cos[place], sin[place], out, wide, narrow)
            for head in range(kv_heads):
                for i in range(width):
                    values[slot, head, i] = qkv[row, heads + kv_heads + head, i]
        task = claim(block)


def _add_norm_float32(block: Any) -> None:
    _add_norm(block, np.float32, same, same)


def _add_norm_bfloat16(block: Any) -> None:
    _add_norm(block, np.uint16, widen, _narrow)


def _silu_mul_float32(block: Any) -> None:
    _silu_mul(block, np.float32, same, same)


def _silu_mul_bfloat16(block: Any) -> None:
    _silu_mul(block, np.uint16, widen, _narrow)


def _rotate_float32(block: Any) -> None:
    _rotate(block, np.float32, same, same)


def _rotate_bfloat16(block: Any) -> None:
    _rotate(block, np.uint16, widen, _narrow)


_ADD_NORM = {torch.float32: Kernel(_add_norm_float32), torch.bfloat16: Kernel(_add_norm_bfloat16)}
_SILU_MUL = {torch.float32: Kernel(_silu_mul_float32), torch.bfloat16: Kernel(_silu_mul_bfloat16)}
_ROTATE = {torch.float32: Kernel(_rotate_float32), torch.bfloat16: Kernel(_rotate_bfloat16)}
