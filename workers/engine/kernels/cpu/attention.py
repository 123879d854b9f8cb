"""Attention of ragged query rows over the paged KV cache, bit for bit independent of the batch.

The value of a row depends on its query and on its ordered list of keys and values, and on nothing else: not on the
other rows of the call, their order, the tiling, the number of threads, nor on whether a key is found through the block
table or in the row's tail. Every row walks its keys in blocks of 64 logical positions with an online softmax (Milakov
and Gimelshein, arXiv 1805.02867) in float32; a window that begins inside a block leaves out the keys before it. The
arithmetic is written as explicit 16-lane vectors without fastmath: the compiler may move instructions but not change an
order of summation; tiling decides only how often a key is loaded.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from workers.engine.kernels.cpu.attention_vectors import (
    GROUP,
    KEYS,
    LANES,
    PANEL,
    VECTOR,
    accumulate,
    at,
    cap,
    finish,
    prefetch,
    put,
    score,
    sink,
    soften,
    stack,
    start,
    tilt,
    transpose,
)
from workers.engine.kernels.cpu.runtime import ARGUMENTS, CLAIMED, TASKS, Kernel, claim, inlined, spliced
from workers.engine.state.rows import PLAIN, AttentionRows, Int32Array, Weighing

TILE_ROWS = 32
"""Rows of one sequence which share a pass over its keys."""
TILE_STATES = 96
"""Rows x query heads of one pass: their running sums should stay in the second-level cache."""
HINTS = 16
"""Rows prefetched at a time: few enough that the load buffers never fill and stall the arithmetic between."""

# The kernel's arguments, after parallel.Kernel's own.
(
    _WORDS_PER_ROW, _KV_HEADS, _HEADS_PER_TASK, _QUERIES_PER_HEAD, _SCALE,
    _Q, _Q_ROW, _Q_HEAD, _K, _K_SLOT, _K_HEAD, _V, _V_SLOT, _V_HEAD, _OUT, _OUT_ROW, _OUT_HEAD,
    _TILES, _SEQUENCE, _PREFIX_LENS, _TAIL_INDPTR, _TAIL_SLOTS, _BLOCK_TABLES, _MAX_BLOCKS, _BLOCK_SIZE,
) = range(ARGUMENTS, ARGUMENTS + 25)  # fmt: skip
# Of a weighing that is not plain.
_WINDOW, _CAP, _STEEPNESS, _SLOPES, _SINKS = range(ARGUMENTS + 25, ARGUMENTS + 30)

LOG2E = math.log2(math.e)
ENDLESS = 2**62


@lru_cache(maxsize=16)  # every layer of a step asks again; a few engines may step at a time
def tiles(rows: AttentionRows) -> Int32Array:
    """[tiles, 2] first and past-last row of runs of at most 32 adjacent rows of one sequence, most expensive first."""
    count = len(rows.sequence)
    starts_run = np.ones(count, np.bool_)
    starts_run[1:] = rows.sequence[1:] != rows.sequence[:-1]
    index = np.arange(count, dtype=np.int32)
    in_run = index - np.maximum.accumulate(np.where(starts_run, index, 0))
    first = np.flatnonzero(in_run % TILE_ROWS == 0)
    if count == 0:
        return np.zeros((0, 2), np.int32)
    keys = rows.prefix_lens.astype(np.int64) + np.diff(rows.tail_indptr)
    order = np.argsort(-np.add.reduceat(keys, first), kind="stable")
    return np.stack([first, np.append(first[1:], count)], axis=1)[order].astype(np.int32)


@lru_cache(maxsize=16)
def _arguments(rows: AttentionRows) -> tuple[int, ...]:
    """What the kernel needs of the rows: addresses and numbers, valid as long as the rows are among those cached."""
    arrays = (tiles(rows), rows.sequence, rows.prefix_lens, rows.tail_indptr, rows.tail_slots, rows.block_tables)
    return (*(array.ctypes.data for array in arrays), rows.block_tables.shape[1], rows.block_size)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rows: AttentionRows,
    scale: float,
    out: torch.Tensor,
    weighing: Weighing = PLAIN,
) -> None:
    """softmax(scale * q k^T) v for every row, weighed as `weighing` says, written to `out`.

    q and out are [T, H, D], k_cache and v_cache one layer's [slots, Hk, D]; query head h reads KV head h // (H / Hk).
    All bfloat16 or all float32 on the CPU, the last dimension contiguous. Sums are kept in float32 and rounded once.
    Raises TypeError for other dtypes and ValueError for shapes the kernel cannot read.
    """
    kernel = (_KERNELS if weighing.is_plain else _WEIGHING_KERNELS).get(q.dtype)
    same = q.dtype == k_cache.dtype == v_cache.dtype == out.dtype
    if kernel is None or not (same and q.is_cpu and k_cache.is_cpu and v_cache.is_cpu and out.is_cpu):
        raise TypeError(f"needs bfloat16 or float32 on the CPU throughout, not {q.dtype}, {k_cache.dtype}, {q.device}")
    count, heads, width = q.shape
    kv_heads = k_cache.shape[1]
    size = q.element_size()
    words = width * size // 4
    if count != len(rows.sequence) or out.shape != q.shape:
        raise ValueError(f"query {tuple(q.shape)}, out {tuple(out.shape)} and {len(rows.sequence)} rows do not fit")
    if k_cache.shape != v_cache.shape or k_cache.shape[2] != width or heads % kv_heads:
        shapes = tuple(tuple(tensor.shape) for tensor in (q, k_cache, v_cache))
        raise ValueError(f"query, keys and values {shapes} do not fit")
    if words * 4 != width * size:
        raise ValueError(f"a bfloat16 head needs an even width, not {width}")
    strides: list[int] = []
    for tensor in (q, k_cache, v_cache, out):
        row, head, element = tensor.stride()
        if element != 1:
            raise ValueError("the head dimension must be contiguous")
        strides += (tensor.data_ptr(), row * size, head * size)
    # Slopes and sinks must live until the kernel has run.
    extra, _kept = ((), None) if weighing.is_plain else _extra_arguments(weighing, heads)
    # With few tiles every head is a task of its own, else a thread keeps a tile and knows which keys come next.
    runs = tiles(rows)
    together = kv_heads if len(runs) >= 4 * torch.get_num_threads() else 1
    tasks = len(runs) * (kv_heads // together)
    numbers = rows.num_keys * heads * width
    kernel(
        tasks, words, kv_heads, together, heads // kv_heads, _bits(scale * LOG2E), *strides, *_arguments(rows), *extra,
        numbers=numbers,
    )  # fmt: skip


def _extra_arguments(weighing: Weighing, heads: int) -> tuple[tuple[int, ...], list[torch.Tensor]]:
    """The kernel's last arguments, and the tensors that two of them point into."""
    cap_at, arrays, kept = (0, 0), [], []
    if weighing.softcap is not None:
        cap_at = _bits(weighing.softcap * LOG2E), _bits(2 / weighing.softcap)
    for numbers in (weighing.slopes, weighing.sinks):
        if numbers is None:
            arrays.append(0)
            continue
        if numbers.shape != (heads,):
            raise ValueError(f"slopes and sinks need {heads} numbers, not {tuple(numbers.shape)}")
        kept.append((numbers.float() * LOG2E).contiguous())
        arrays.append(kept[-1].data_ptr())
    return (weighing.window or ENDLESS, *cap_at, *arrays), kept


def _bits(number: float) -> int:
    return int(np.float32(number).view(np.int32))


# The loops: which rows, which keys ---------------------------------------------------------------------------------


@inlined
def _length(block: Any, row: int) -> int:
    """Number of keys of a row."""
    tail = block[_TAIL_INDPTR]
    return at(block[_PREFIX_LENS], row) + at(tail, row + 1) - at(tail, row)  # type: ignore[no-any-return]


@inlined
def _first_key(block: Any, row: int) -> int:
    """Logical position of the first key in a row's window."""
    return max(0, _length(block, row) - block[_WINDOW])  # type: ignore[no-any-return]


@inlined
def _read_table(block: Any, row: int, base: int, begin: int, end: int, slots: int) -> None:
    """slots[begin:end] = the slots of logical positions base + begin ... base + end of the row's sequence."""
    table = block[_BLOCK_TABLES] + 4 * block[_MAX_BLOCKS] * at(block[_SEQUENCE], row)
    size = block[_BLOCK_SIZE]
    i = begin
    while i < end:
        number, offset = (base + i) // size, (base + i) % size
        first = at(table, number) * size + offset - i
        stop = min(end, i + size - offset)
        while i < stop:
            put(slots, i, first + i)
            i += 1


@inlined
def _read_tail(block: Any, row: int, base: int, begin: int, end: int, slots: int) -> None:
    """The same for logical positions past the prefix."""
    shift = at(block[_TAIL_INDPTR], row) - at(block[_PREFIX_LENS], row) + base
    for i in range(begin, end):
        put(slots, i, at(block[_TAIL_SLOTS], shift + i))


@inlined
def _hint(block: Any, head: int, slots: int, count: int, cursor: int) -> int:
    """Prefetch the next few of `count` keys, then values, of the block to come; returns the advanced cursor."""
    stop = min(cursor + HINTS, 2 * count)
    keys, values = block[_K] + head * block[_K_HEAD], block[_V] + head * block[_V_HEAD]
    for i in range(cursor, stop):
        if i < count:
            prefetch(keys + at(slots, i) * block[_K_SLOT], 4 * block[_WORDS_PER_ROW])
        else:
            prefetch(values + at(slots, i - count) * block[_V_SLOT], 4 * block[_WORDS_PER_ROW])
    return stop


@spliced
def _attend_rows(
    block: Any, bfloat16: bool, plain: bool, begin: int, end: int, head: int, next_row: int, next_head: int, memory: Any
) -> None:
    """Rows begin ... end of one sequence, one KV head; `next_row` and `next_head` will likely be needed next."""
    states, state_size, slots, keys, scores, decays, hints = memory
    group, words, pitch = block[_QUERIES_PER_HEAD], block[_WORDS_PER_ROW], _pitch(block)
    totals_at, sums_at = state_size // 2, state_size // 2 + VECTOR
    k, v = block[_K] + head * block[_K_HEAD], block[_V] + head * block[_V_HEAD]
    longest, known, first = 0, 0, 0 if plain else _first_key(block, begin)
    for row in range(begin, end):
        longest, known = max(longest, _length(block, row)), max(known, at(block[_PREFIX_LENS], row))
        if not plain:
            first = min(first, _first_key(block, row))
        for member in range(group):
            query = block[_Q] + row * block[_Q_ROW] + (head * group + member) * block[_Q_HEAD]
            state = states + ((row - begin) * group + member) * state_size
            start(bfloat16, query, words, pitch, block[_SCALE], state)
            if not plain and block[_SINKS]:
                sink(state, state + totals_at, at(block[_SINKS], head * group + member))

    for base in range(0 if plain else first // KEYS * KEYS, longest, KEYS):
        # Keys and values of the block after this one are prefetched while this one is computed: each `_hint` below asks
        # for a few of them before a piece of arithmetic, so that loads and arithmetic overlap. After the last block
        # that is the first block of the rows or the head which likely come next. Only keys of the block table are
        # hinted at; those of tails are not.
        if base + KEYS < longest:
            hint_head, hint_count = head, max(0, min(KEYS, known - base - KEYS))
            _read_table(block, begin, base + KEYS, 0, hint_count, hints)
        else:
            next_base = 0 if plain else _first_key(block, next_row) // KEYS * KEYS
            hint_head, hint_count = next_head, max(0, min(KEYS, at(block[_PREFIX_LENS], next_row) - next_base))
            _read_table(block, next_row, next_base, 0, hint_count, hints)
        cursor = 0
        shared = min(KEYS, known - base)
        loaded = 0  # slots[:loaded] and their keys are the table's; beyond may lie another row's tail
        # Rows of a sequence share the keys of its table: the first row that needs them transposes them for all,
        # and each row adds its own tail.
        for row in range(begin, end):
            count = min(KEYS, _length(block, row) - base)
            unseen = 0 if plain else max(0, _first_key(block, row) - base)
            if count <= unseen:
                continue
            from_table = min(count, max(0, at(block[_PREFIX_LENS], row) - base))
            fresh, stop = min(loaded, from_table), 0
            if from_table > loaded:
                _read_table(block, row, base, loaded, shared, slots)
                stop, loaded = shared, shared
            if from_table < count:
                _read_tail(block, row, base, from_table, count, slots)
                # The tail overwrites what lay behind the row's own prefix, so a later row may have to read that again.
                stop, loaded = count, from_table
            for lanes in range(fresh // LANES, (stop + LANES - 1) // LANES):
                cursor = _hint(block, hint_head, hints, hint_count, cursor)
                transpose(slots + VECTOR * lanes, k, block[_K_SLOT], words, keys + VECTOR * lanes)
            for member in range(0, group, GROUP):
                together = min(GROUP, group - member)
                state = states + ((row - begin) * group + member) * state_size
                cursor = _hint(block, hint_head, hints, hint_count, cursor)
                score(bfloat16, together, state, state_size, words, pitch, keys, scores)
                if not plain:
                    _bend(block, head * group + member, together, base + 1 - _length(block, row), scores)
                for i in range(together):
                    cursor = _hint(block, hint_head, hints, hint_count, cursor)
                    own = state + i * state_size
                    soften(unseen, count, own, own + totals_at, scores + 4 * KEYS * i, decays + VECTOR * i)
                cursor = _hint(block, hint_head, hints, hint_count, cursor)
                accumulate(
                    bfloat16, together, state + sums_at, state_size, words,
                    unseen, count, slots, v, block[_V_SLOT], scores, decays,
                )  # fmt: skip

    for row in range(begin, end):
        for member in range(group):
            state = states + ((row - begin) * group + member) * state_size
            target = block[_OUT] + row * block[_OUT_ROW] + (head * group + member) * block[_OUT_HEAD]
            finish(bfloat16, state + totals_at, state + sums_at, words, target)


@inlined
def _bend(block: Any, head: int, together: int, first: int, scores: int) -> None:
    """Cap the scores of a few heads and tilt them; `first` is the first key's position, seen from the row's."""
    for i in range(together):
        if block[_CAP]:
            cap(scores + 4 * KEYS * i, block[_CAP], block[_STEEPNESS])
        if block[_SLOPES]:
            tilt(scores + 4 * KEYS * i, at(block[_SLOPES], head + i), first)


@inlined
def _pitch(block: Any) -> int:
    """Words of a row, rounded up to whole panels."""
    return (block[_WORDS_PER_ROW] + PANEL - 1) // PANEL * PANEL  # type: ignore[no-any-return]


@spliced
def _attend(block: Any, bfloat16: bool, plain: bool) -> None:
    state_size = 8 * _pitch(block) * (2 if bfloat16 else 1) + 2 * VECTOR
    step = max(1, TILE_STATES // block[_QUERIES_PER_HEAD])
    slots = stack(4 * KEYS)
    memory = (
        stack(step * block[_QUERIES_PER_HEAD] * state_size), state_size, slots, stack(4 * KEYS * _pitch(block)),
        stack(GROUP * 4 * KEYS), stack(GROUP * VECTOR), stack(4 * KEYS),
    )  # fmt: skip
    for i in range(KEYS):  # lanes past the last key load some slot: let it be one that exists
        put(slots, i, 0)

    heads = block[_HEADS_PER_TASK]
    shares = block[_KV_HEADS] // heads
    while True:
        task = claim(block)
        if task >= block[TASKS]:
            return
        first, last = at(block[_TILES], 2 * (task // shares)), at(block[_TILES], 2 * (task // shares) + 1)
        first_head = task % shares * heads
        for begin in range(first, last, step):
            end = min(begin + step, last)
            for head in range(first_head, first_head + heads):
                next_row, next_head = begin, head + 1
                if next_head == first_head + heads:
                    next_row, next_head = end, first_head
                    if end == last:
                        # A guess, since another thread may claim it first. A wrong hint costs time, never a result.
                        guess = min(block[CLAIMED], block[TASKS] - 1)
                        next_row, next_head = at(block[_TILES], 2 * (guess // shares)), guess % shares * heads
                _attend_rows(block, bfloat16, plain, begin, end, head, next_row, next_head, memory)


def _attend_bfloat16(block: Any) -> None:
    _attend(block, True, True)


def _attend_float32(block: Any) -> None:
    _attend(block, False, True)


def _weigh_bfloat16(block: Any) -> None:
    _attend(block, True, False)


def _weigh_float32(block: Any) -> None:
    _attend(block, False, False)


_KERNELS = {torch.bfloat16: Kernel(_attend_bfloat16), torch.float32: Kernel(_attend_float32)}
_WEIGHING_KERNELS = {torch.bfloat16: Kernel(_weigh_bfloat16), torch.float32: Kernel(_weigh_float32)}
"""Apart, so that most models neither wait for what they do not use nor compile it."""
