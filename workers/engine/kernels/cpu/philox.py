"""Noise as a pure function of (seed, position, stream, token): no generator, no state, no order of drawing.

Philox4x32-10 (Salmon et al., SC 2011; Random123). The key is the 64-bit seed, low word first. The counter is

    word 0   token id // 4 for Gumbel noise, which takes output word (token id % 4); the index for uniforms
    word 1   position, low 32 bits
    word 2   position, next 24 bits, below the stream's 8 bits
    word 3   the step that asks; 0 where noise must depend on the position alone

Gumbel noise is -log(-log(1 - v)) with v = (word + 1/2) / 2^32 in float32. Large values come from small v, where float32
is finest, so all 32 bits count there: noise lies in [-2.82, 22.88], never infinite, and a token of probability 1e-9 can
still win, which a 24-bit uniform near 1 could not give. Logarithms are written out below: library ones round
differently in a vectorised loop and in its remainder, and the noise of a token must not know its neighbours.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types

from workers.engine.kernels.cpu.runtime import ARGUMENTS, TASKS, Kernel, claim, inlined, operation

TARGET, DRAFT, ACCEPT, RESIDUAL = 0, 1, 2, 3
"""Streams: noise of the sampler (shared by coupled drafts), of independent drafts, of acceptance tests, and of what is
drawn after one failed."""

CHUNK = 4096
"""Tokens per task; a multiple of 4."""
_SEEDS, _POSITIONS, _INDICES, _OUT, _WIDTH, _STREAM, _STEP = range(ARGUMENTS, ARGUMENTS + 7)

_float32, _uint32, _uint64, _int64 = types.float32, types.uint32, types.uint64, types.int64


def gumbel_rows(
    seeds: npt.ArrayLike, positions: npt.ArrayLike, vocab: int, stream: int = TARGET, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Noise [R, vocab] float32 of every token for R rows with `seeds` [R] uint64 and `positions` [R].

    `out`, if given, is a contiguous float32 [R, vocab] on the CPU to fill and return.
    """
    rows, seeds, positions = _rows(seeds, positions)
    out = torch.empty(rows, vocab) if out is None else out
    if out.shape != (rows, vocab) or out.dtype != torch.float32 or not out.is_contiguous():
        raise ValueError(f"out must be contiguous float32 {(rows, vocab)}, not {out.dtype} {tuple(out.shape)}")
    chunks = -(-vocab // CHUNK)
    _gumbel_rows(
        rows * chunks,
        seeds.ctypes.data,
        positions.ctypes.data,
        0,
        out.data_ptr(),
        vocab,
        stream,
        0,
        numbers=rows * vocab,
    )
    return out


def uniform_at(
    seeds: npt.ArrayLike, positions: npt.ArrayLike, indices: npt.ArrayLike, stream: int = ACCEPT, step: int = 0
) -> torch.Tensor:
    """Uniforms [R, K] float64 in [0, 1), of 53 bits, for `indices` [R, K] (say, siblings of a draft tree)."""
    rows, seeds, positions = _rows(seeds, positions)
    numbers = np.ascontiguousarray(indices, np.int64).reshape(rows, -1)
    out = torch.empty(numbers.shape, dtype=torch.float64)
    addresses = (seeds.ctypes.data, positions.ctypes.data, numbers.ctypes.data, out.data_ptr())
    _uniform_at(rows, *addresses, numbers.shape[1], stream, step, numbers=numbers.size)
    return out


def _rows(seeds: npt.ArrayLike, positions: npt.ArrayLike) -> tuple[int, npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    seeds, positions = np.ascontiguousarray(seeds, np.uint64), np.ascontiguousarray(positions, np.int64)
    if seeds.ndim != 1 or seeds.shape != positions.shape:
        raise ValueError(f"one seed and one position per row, not {seeds.shape} and {positions.shape}")
    return len(seeds), seeds, positions


# Compiled code; usable from other kernels ---------------------------------------------------------------------------


@operation(_float32, _uint32)
def _as_float(builder: Any, bits: Any) -> Any:
    return builder.bitcast(bits, ir.FloatType())


@operation(_uint32, _float32)
def _as_bits(builder: Any, number: Any) -> Any:
    return builder.bitcast(number, ir.IntType(32))


@operation(_float32, _float32, _float32, _float32)
def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return builder.fma(a, b, c)


def _pointer_to(number: Any, element: Any) -> Any:
    @operation(types.CPointer(number), _int64)
    def pointer(builder: Any, address: Any) -> Any:
        return builder.inttoptr(address, ir.PointerType(element))

    return pointer


_floats, _doubles = _pointer_to(_float32, ir.FloatType()), _pointer_to(types.float64, ir.DoubleType())
_integers, _naturals = _pointer_to(_int64, ir.IntType(64)), _pointer_to(_uint64, ir.IntType(64))


@inlined
def philox(
    c0: np.uint32, c1: np.uint32, c2: np.uint32, c3: np.uint32, seed: np.uint64
) -> tuple[np.uint32, np.uint32, np.uint32, np.uint32]:
    """Ten rounds of Philox4x32 on one counter."""
    k0, k1 = np.uint32(seed), np.uint32(seed >> np.uint64(32))
    for _ in range(10):
        left, right = np.uint64(c0) * np.uint64(0xD2511F53), np.uint64(c2) * np.uint64(0xCD9E8D57)
        c0 = np.uint32(right >> np.uint64(32)) ^ c1 ^ k0
        c2 = np.uint32(left >> np.uint64(32)) ^ c3 ^ k1
        c1, c3 = np.uint32(right), np.uint32(left)
        k0, k1 = np.uint32(k0 + np.uint32(0x9E3779B9)), np.uint32(k1 + np.uint32(0xBB67AE85))
    return np.uint32(c0), c1, np.uint32(c2), c3


@inlined
def four_words(
    seed: np.uint64, position: int, index: int, stream: int, step: int
) -> tuple[np.uint32, np.uint32, np.uint32, np.uint32]:
    """The module's counter layout."""
    high = np.uint32((position >> 32 & 0xFFFFFF) | stream << 24)
    return philox(np.uint32(index), np.uint32(position), high, np.uint32(step), seed)


@inlined
def _log(exponent: np.float32, f: np.float32) -> np.float32:
    """log(2^exponent (1 + f)) for 1 + f in [sqrt(1/2), sqrt(2)], to about 1 ulp (Cephes' logf)."""
    p = np.float32(7.0376836292e-2)
    p = _fma(p, f, np.float32(-1.1514610310e-1))
    p = _fma(p, f, np.float32(1.1676998740e-1))
    p = _fma(p, f, np.float32(-1.2420140846e-1))
    p = _fma(p, f, np.float32(1.4249322787e-1))
    p = _fma(p, f, np.float32(-1.6668057665e-1))
    p = _fma(p, f, np.float32(2.0000714765e-1))
    p = _fma(p, f, np.float32(-2.4999993993e-1))
    p = _fma(p, f, np.float32(3.3333331174e-1))
    square = f * f
    rest = _fma(exponent, np.float32(-2.12194440e-4), f * (square * p))
    rest = _fma(square, np.float32(-0.5), rest)
    return _fma(exponent, np.float32(0.693359375), f + rest)  # type: ignore[no-any-return]


@inlined
def _split(x: np.float32) -> tuple[np.float32, np.float32]:
    """x > 0 as (exponent, f) for `_log`."""
    above = np.int32(_as_bits(x)) - np.int32(0x3F3504F3)
    exponent = np.int32(above >> 23)
    mantissa = _as_float(np.uint32(np.int32(above & 0x7FFFFF) + np.int32(0x3F3504F3)))
    return np.float32(exponent), mantissa - np.float32(1)


@inlined
def gumbel_of(word: np.uint32) -> np.float32:
    """Gumbel noise from 32 random bits."""
    v = (np.float32(word) + np.float32(0.5)) * np.float32(2.0**-32)
    v = min(v, np.float32(1 - 2.0**-24))
    exponent, f = _split(np.float32(1) - v)
    # Next to 1 the subtraction has lost v's low bits: take them from v.
    f = -v if exponent == np.float32(0) else f
    exponent, f = _split(-_log(exponent, f))
    return -_log(exponent, f)


@inlined
def gumbel(seed: np.uint64, position: int, token: int) -> np.float32:
    """Noise of one token in the target's stream."""
    return _gumbel(seed, position, token, 0)


@inlined
def _gumbel(seed: np.uint64, position: int, token: int, stream: int) -> np.float32:
    a, b, c, d = four_words(seed, position, token >> 2, stream, 0)
    low = b if token & 1 else a
    high = d if token & 1 else c
    return gumbel_of(high if token & 2 else low)


def _every_token(block: Any) -> None:
    vocab, stream = block[_WIDTH], block[_STREAM]
    chunks = (vocab + CHUNK - 1) // CHUNK
    while True:
        task = claim(block)
        if task >= block[TASKS]:
            return
        row, first = task // chunks, task % chunks * CHUNK
        seed, position = _naturals(block[_SEEDS])[row], _integers(block[_POSITIONS])[row]
        out = _floats(block[_OUT] + 4 * (row * vocab + first))
        size = min(CHUNK, vocab - first)
        for i in range(size // 4):
            a, b, c, d = four_words(seed, position, first // 4 + i, stream, 0)
            out[4 * i] = gumbel_of(a)
            out[4 * i + 1] = gumbel_of(b)
            out[4 * i + 2] = gumbel_of(c)
            out[4 * i + 3] = gumbel_of(d)
        for i in range(size // 4 * 4, size):
            out[i] = _gumbel(seed, position, first + i, stream)


def _uniforms(block: Any) -> None:
    width = block[_WIDTH]
    while True:
        row = claim(block)
        if row >= block[TASKS]:
            return
        seed, position = _naturals(block[_SEEDS])[row], _integers(block[_POSITIONS])[row]
        indices, out = _integers(block[_INDICES] + 8 * row * width), _doubles(block[_OUT] + 8 * row * width)
        for i in range(width):
            a, b, _, _ = four_words(seed, position, indices[i], block[_STREAM], block[_STEP])
            out[i] = np.float64((np.uint64(a) << np.uint64(21)) | (np.uint64(b) >> np.uint64(11))) * 2.0**-53


_gumbel_rows, _uniform_at = Kernel(_every_token), Kernel(_uniforms)
