"""From logits to tokens in one pass per row, and one row per task, so that no row can feel another."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import carray

from workers.engine.kernels.cpu.filters import BINS, keep, mass_of, shift_of, token_of
from workers.engine.kernels.cpu.floats import (
    BLOCK,
    LANES,
    exp_all,
    find_max,
    max_level,
    pointer,
    total,
)
from workers.engine.kernels.cpu.philox import TARGET, four_words, gumbel, gumbel_of
from workers.engine.kernels.cpu.runtime import ARGUMENTS, TASKS, Kernel, claim, inlined
from workers.engine.state.drawn import MASKED, Drawn

ROW = np.dtype(
    [
        ("address", np.int64),  # of the row's first logit
        ("key", np.uint64),
        ("position", np.int64),
        ("top_p", np.float64),
        ("top_k", np.int64),  # 0: off
        ("min_p", np.float32),
        ("temperature", np.float32),  # > 0
        ("noise", np.int64),  # 0: none, as at temperature 0
    ],
    align=True,
)


def argmax(dtype: torch.dtype, vocab: int, addresses: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Id of the largest logit of each row, the lowest of equals, or MASKED or INVALID.

    `addresses` are those of the first of `vocab` contiguous logits: bfloat16, float32 or float64.
    """
    tokens = np.empty(len(addresses), np.int64)
    _ARGMAX[dtype](len(addresses), addresses.ctypes.data, vocab, tokens.ctypes.data, numbers=len(addresses) * vocab)
    return tokens


def draw(dtype: torch.dtype, vocab: int, table: npt.NDArray[np.void], k: int, *, masses: bool) -> Drawn:
    """Filter each row of `table` (of type ROW), add its noise and take the best k >= 1; log_masses only if asked for.

    Equal scores go to the lowest id. The result for k is a prefix of the result for k + 1.
    """
    rows = len(table)
    drawn = Drawn(np.empty((rows, k), np.int64), np.empty((rows, k), np.float32), np.zeros(rows))
    arrays = (drawn.tokens, drawn.scores, drawn.log_masses)
    outputs = (array.ctypes.data for array in arrays)
    _DRAW[dtype](rows, table.ctypes.data, vocab, k, masses, *outputs, numbers=rows * vocab)
    return drawn


# Choosing -----------------------------------------------------------------------------------------------------------


@inlined
def _insert(token: Any, score: Any, tokens: Any, scores: Any) -> None:
    """Keep the best by (score descending, id ascending)."""
    slot = len(tokens) - 1
    if score < scores[slot] or (score == scores[slot] and tokens[slot] < token):
        return
    while slot > 0 and (scores[slot - 1] < score or (scores[slot - 1] == score and tokens[slot - 1] > token)):
        tokens[slot], scores[slot] = tokens[slot - 1], scores[slot - 1]
        slot -= 1
    tokens[slot], scores[slot] = token, score


@inlined
def _add_noise(row: Any, first: Any, scores: Any) -> None:
    """Add the noise of the tokens from `first`, a multiple of 4, four to a generator call."""
    fours = len(scores) // 4
    for i in range(fours):
        a, b, c, d = four_words(row.key, row.position, first // 4 + i, TARGET, 0)
        scores[4 * i] += gumbel_of(a)
        scores[4 * i + 1] += gumbel_of(b)
        scores[4 * i + 2] += gumbel_of(c)
        scores[4 * i + 3] += gumbel_of(d)
    for i in range(4 * fours, len(scores)):
        scores[i] += gumbel(row.key, row.position, first + i)


@inlined
def _choose_all(row: Any, shifts: Any, scratch: Any, tokens: Any, scores: Any) -> None:
    for start in range(0, len(shifts), BLOCK):
        part = scratch[start : min(start + BLOCK, len(shifts))]
        for i in range(len(part)):
            part[i] = shifts[start + i]
        if row.noise:
            _add_noise(row, start, part)
        # Most blocks hold none of the best: one comparison with the last of them passes over such a block.
        highest = max_level(part.view(np.int32), np.int32)
        if highest > max_level(scores[len(scores) - 1 :].view(np.int32), np.int32):
            for i in range(len(part)):
                if part[i] > scores[len(scores) - 1]:
                    _insert(start + i, part[i], tokens, scores)


@inlined
def _choose_kept(row: Any, kept: Any, tokens: Any, scores: Any) -> None:
    for i in range(len(kept)):
        token, score = token_of(kept[i]), shift_of(kept[i])
        if row.noise:
            score += gumbel(row.key, row.position, token)
        _insert(token, score, tokens, scores)


# Kernels ------------------------------------------------------------------------------------------------------------


@inlined
def _argmax_rows(block: Any, word: Any, infinity: Any) -> None:
    rows, vocab = block[TASKS], block[ARGUMENTS + 1]
    addresses = carray(pointer(block[ARGUMENTS]), (rows,), np.int64)
    tokens = carray(pointer(block[ARGUMENTS + 2]), (rows,), np.int64)
    index = claim(block)
    while index < rows:
        tokens[index] = find_max(carray(pointer(addresses[index]), (vocab,), word), word, infinity)
        index = claim(block)


@inlined
def _draw_rows(block: Any, word: Any, infinity: Any, shift: Any) -> None:
    rows, vocab, best, masses = block[TASKS], block[ARGUMENTS + 1], block[ARGUMENTS + 2], block[ARGUMENTS + 3]
    table = carray(pointer(block[ARGUMENTS]), (rows,), ROW)
    all_tokens = carray(pointer(block[ARGUMENTS + 4]), (rows, best), np.int64)
    all_scores = carray(pointer(block[ARGUMENTS + 5]), (rows, best), np.float32)
    log_masses = carray(pointer(block[ARGUMENTS + 6]), (rows,), np.float64)
    shifts, scratch = np.empty(vocab, np.float32), np.empty(vocab, np.float32)
    ranks, edge = np.empty(vocab, np.uint64), np.empty(vocab, np.uint64)
    histogram, partial = np.empty(BINS), np.empty(LANES)
    index = claim(block)
    while index < rows:
        row, tokens, scores = table[index], all_tokens[index], all_scores[index]
        top = find_max(carray(pointer(row.address), (vocab,), word), word, infinity)
        # Nothing chosen yet: MASKED, or INVALID, which is less, where `top` is that.
        tokens[:], scores[:] = min(top, MASKED), np.float32(-np.inf)
        if top >= 0:
            shift(row, vocab, top, shifts)
            if row.top_k > 0 or row.top_p < 1.0 or row.min_p > 0.0:
                kept = ranks[: keep(row, shifts, scratch, histogram, ranks, edge)]
                _choose_kept(row, kept, tokens, scores)
                if masses:
                    log_masses[index] = math.log(mass_of(kept))
            else:
                _choose_all(row, shifts, scratch, tokens, scores)
                if masses:
                    exp_all(shifts, scratch)
                    log_masses[index] = math.log(total(scratch, partial))
        index = claim(block)


@inlined
def _shift_float(row: Any, vocab: Any, top: Any, shifts: Any, number: Any) -> None:
    logits = carray(pointer(row.address), (vocab,), number)
    maximum = logits[top]
    for i in range(vocab):
        shifts[i] = np.float32(logits[i] - maximum) / row.temperature


@inlined
def shift_float32(row: Any, vocab: Any, top: Any, shifts: Any) -> None:
    _shift_float(row, vocab, top, shifts, np.float32)


@inlined
def shift_float64(row: Any, vocab: Any, top: Any, shifts: Any) -> None:
    _shift_float(row, vocab, top, shifts, np.float64)


@inlined
def shift_bfloat16(row: Any, vocab: Any, top: Any, shifts: Any) -> None:
    # A bfloat16 is the upper half of a float32.
    logits, widened = carray(pointer(row.address), (vocab,), np.uint16), shifts.view(np.uint32)
    for i in range(vocab):
        widened[i] = np.uint32(logits[i]) << np.uint32(16)
    maximum = shifts[top]
    for i in range(vocab):
        shifts[i] = (shifts[i] - maximum) / row.temperature


def _argmax_bfloat16(block: Any) -> None:
    _argmax_rows(block, np.int16, 0x7F80)


def _argmax_float32(block: Any) -> None:
    _argmax_rows(block, np.int32, 0x7F800000)


def _argmax_float64(block: Any) -> None:
    _argmax_rows(block, np.int64, 0x7FF0000000000000)


def _draw_bfloat16(block: Any) -> None:
    _draw_rows(block, np.int16, 0x7F80, shift_bfloat16)


def _draw_float32(block: Any) -> None:
    _draw_rows(block, np.int32, 0x7F800000, shift_float32)


def _draw_float64(block: Any) -> None:
    _draw_rows(block, np.int64, 0x7FF0000000000000, shift_float64)


_ARGMAX = {
    torch.bfloat16: Kernel(_argmax_bfloat16),
    torch.float32: Kernel(_argmax_float32),
    torch.float64: Kernel(_argmax_float64),
}
_DRAW = {
    torch.bfloat16: Kernel(_draw_bfloat16),
    torch.float32: Kernel(_draw_float32),
    torch.float64: Kernel(_draw_float64),
}


def compile_kernels(dtype: torch.dtype) -> None:
    """Compile now what would be compiled when the first token of logits of this type is drawn."""
    for kernels in (_ARGMAX, _DRAW):
        if dtype in kernels:
            kernels[dtype].compile()
