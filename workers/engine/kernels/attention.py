"""Attention of ragged query rows over the paged KV cache, bit for bit independent of the batch.

The value of a row depends on its query and on its ordered list of keys and values, and on nothing else: not on the
other rows of the call, their order, the tiling, the number of threads, nor on whether a key is found through the block
table or in the row's tail. Every row walks its keys in blocks of 64 logical positions with an online softmax (Milakov
and Gimelshein, arXiv 1805.02867) in float32. The arithmetic is written as explicit 16-lane vectors without fastmath:
the compiler may move instructions but not change an order of summation; tiling decides only how often a key is loaded.

A *word* is 32 bits of a cached row: one float32, or two bfloat16, which widen by a shift and a mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils

from workers.engine.kernels.parallel import ARGUMENTS, CLAIMED, TASKS, Kernel, claim, inlined, operation, spliced

Int32Array = npt.NDArray[np.int32]

KEYS = 64
"""Logical positions per softmax block. Part of the definition of the result: changing it changes low-order bits."""
LANES = 16
VECTOR = 4 * LANES
"""Bytes of one vector."""
PANEL = 2 * LANES
"""Words of a value row which are summed together: with four heads they fill the registers."""
GROUP = 4
"""Query heads computed together from one loaded key or value."""
TILE_ROWS = 32
"""Rows of one sequence which share a pass over its keys."""
TILE_STATES = 96
"""Rows x query heads of one pass: their running sums should stay in the second-level cache."""
HINTS = 16
"""Rows prefetched at a time: few enough that the load buffers never fill and stall the arithmetic between."""
CACHE_LINE = 64

# The kernel's arguments, after parallel.Kernel's own.
(
    _WORDS_PER_ROW, _KV_HEADS, _HEADS_PER_TASK, _QUERIES_PER_HEAD, _SCALE,
    _Q, _Q_ROW, _Q_HEAD, _K, _K_SLOT, _K_HEAD, _V, _V_SLOT, _V_HEAD, _OUT, _OUT_ROW, _OUT_HEAD,
    _TILES, _SEQUENCE, _PREFIX_LENS, _TAIL_INDPTR, _TAIL_SLOTS, _BLOCK_TABLES, _MAX_BLOCKS, _BLOCK_SIZE,
) = range(ARGUMENTS, ARGUMENTS + 25)  # fmt: skip


@dataclass(frozen=True, eq=False)
class AttentionRows:
    """Which keys each of T query rows attends to; built once per step and used by every layer.

    Row t reads `prefix_lens[t]` keys through the block table of its sequence (logical positions 0, 1, ...), then the
    slots `tail_slots[tail_indptr[t]:tail_indptr[t + 1]]`, root side first. A row of a chain at position p has
    prefix_lens = p + 1 and no tail; a node of a draft tree has the committed length and its path down to itself.
    A row without any key (padding) gets zeros. Adjacent rows of one sequence share the loads of their keys.

    Slots are not checked against the pool: a wrong table reads foreign memory.
    """

    sequence: Int32Array  # [T] row of block_tables
    prefix_lens: Int32Array  # [T]
    tail_indptr: Int32Array  # [T + 1]
    tail_slots: Int32Array  # [tail_indptr[T]]
    block_tables: Int32Array  # [B, max_blocks]; slot = block * block_size + offset
    block_size: int

    def __post_init__(self) -> None:
        for name in ("sequence", "prefix_lens", "tail_indptr", "tail_slots", "block_tables"):
            array = getattr(self, name)
            if array.dtype != np.int32 or not array.flags.c_contiguous:
                raise TypeError(f"{name} must be a contiguous int32 array, not {array.dtype}")
        rows = len(self.sequence)
        if len(self.prefix_lens) != rows or len(self.tail_indptr) != rows + 1 or self.block_tables.ndim != 2:
            raise ValueError("sequence and prefix_lens need T entries, tail_indptr T + 1, block_tables two dimensions")
        if self.tail_indptr[-1] > len(self.tail_slots):
            raise ValueError("tail_indptr points past tail_slots")
        if rows and self.prefix_lens.max() > self.block_tables.shape[1] * self.block_size:
            raise ValueError("a prefix is longer than its block table")

    @classmethod
    def causal(
        cls, sequence: Int32Array, positions: Int32Array, block_tables: Int32Array, block_size: int
    ) -> AttentionRows:
        """Rows without tails: row t sits at `positions[t]` and sees everything up to itself."""
        return cls(
            sequence=sequence,
            prefix_lens=positions + np.int32(1),
            tail_indptr=np.zeros(len(sequence) + 1, np.int32),
            tail_slots=np.zeros(0, np.int32),
            block_tables=block_tables,
            block_size=block_size,
        )

    @cached_property
    def tiles(self) -> Int32Array:
        """[tiles, 2] first and past-last row of runs of at most 32 adjacent rows of one sequence, dearest first."""
        rows = len(self.sequence)
        starts_run = np.ones(rows, np.bool_)
        starts_run[1:] = self.sequence[1:] != self.sequence[:-1]
        index = np.arange(rows, dtype=np.int32)
        in_run = index - np.maximum.accumulate(np.where(starts_run, index, 0))
        first = np.flatnonzero(in_run % TILE_ROWS == 0)
        if rows == 0:
            return np.zeros((0, 2), np.int32)
        keys = self.prefix_lens.astype(np.int64) + np.diff(self.tail_indptr)
        order = np.argsort(-np.add.reduceat(keys, first), kind="stable")
        return np.stack([first, np.append(first[1:], rows)], axis=1)[order].astype(np.int32)

    @cached_property
    def num_keys(self) -> int:
        """Keys of all rows together."""
        return int(self.prefix_lens.sum()) + int(self.tail_indptr[-1])

    @cached_property
    def arguments(self) -> tuple[int, ...]:
        """What the kernel needs of this object: addresses and numbers, valid as long as the object lives."""
        arrays = (self.tiles, self.sequence, self.prefix_lens, self.tail_indptr, self.tail_slots, self.block_tables)
        return (*(array.ctypes.data for array in arrays), self.block_tables.shape[1], self.block_size)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rows: AttentionRows,
    scale: float,
    out: torch.Tensor,
) -> None:
    """softmax(scale * q k^T) v for every row, written to `out`.

    q and out are [T, H, D], k_cache and v_cache one layer's [slots, Hk, D]; query head h reads KV head h // (H / Hk).
    All bfloat16 or all float32 on the CPU, the last dimension contiguous. Sums are kept in float32 and rounded once.
    Raises TypeError for other dtypes and ValueError for shapes the kernel cannot read.
    """
    kernel = _KERNELS.get(q.dtype)
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
    folded = np.float32(scale * math.log2(math.e)).view(np.int32).item()
    # With few tiles every head is a task of its own, else a thread keeps a tile and knows which keys come next.
    together = kv_heads if len(rows.tiles) >= 4 * torch.get_num_threads() else 1
    tasks = len(rows.tiles) * (kv_heads // together)
    numbers = rows.num_keys * heads * width
    kernel(tasks, words, kv_heads, together, heads // kv_heads, folded, *strides, *rows.arguments, numbers=numbers)


# Vector code -------------------------------------------------------------------------------------------------------
#
# Addresses are plain integers. The state of one (row, query head), by byte:
#   [0, 64)               running maximum, the same in 16 lanes
#   [64, 64 + Q)          scaled query, float32 [parts, pitch]: number w of part p meets part p of a key's word w
#   [64 + Q, 128 + Q)     total weight, 16 partial sums
#   [128 + Q, 128 + 2Q)   weighted sum of values, float32 [pitch / 16, parts, 16]

_I32, _I64, _F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
_FLOATS, _WORDS, _INDICES = (ir.VectorType(element, LANES) for element in (_F32, _I32, _I64))
_int, _bool, _void = types.int64, types.boolean, types.void


def _const(value: int) -> ir.Constant:
    return ir.Constant(_I64, value)


def _all(vector: ir.VectorType, value: Any) -> ir.Constant:
    return ir.Constant(vector, [value] * LANES)


def _spread(builder: Any, scalar: Any) -> Any:
    vector = ir.VectorType(scalar.type, LANES)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, first, _all(_WORDS, 0))


def _address(builder: Any, base: Any, index: Any, stride: Any) -> Any:
    stride = _const(stride) if isinstance(stride, int) else stride
    return builder.add(base, builder.mul(index, stride))


def _load(builder: Any, address: Any, target: Any, offset: int = 0) -> Any:
    pointer = builder.inttoptr(builder.add(address, _const(offset)), ir.PointerType(target))
    return builder.load(pointer, typ=target, align=4)


def _store(builder: Any, value: Any, address: Any, offset: int = 0) -> None:
    pointer = builder.inttoptr(builder.add(address, _const(offset)), ir.PointerType(value.type))
    builder.store(value, pointer, align=4)


def _call(builder: Any, name: str, result: Any, *values: Any) -> Any:
    signature = ir.FunctionType(result, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), values)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    return _call(builder, "llvm.fma.v16f32", _FLOATS, a, b, c)


def _maximum(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _leading(builder: Any, count: Any) -> Any:
    """Mask of the first `count` lanes: none if it is negative, all if it exceeds 16."""
    return builder.icmp_signed("<", ir.Constant(_INDICES, list(range(LANES))), _spread(builder, count))


def _load_words(builder: Any, address: Any, mask: Any) -> Any:
    pointer = builder.inttoptr(address, ir.PointerType(_WORDS))
    # Rows of bfloat16 promise no more than 2-byte alignment.
    return _call(builder, "llvm.masked.load.v16i32.p0", _WORDS, pointer, ir.Constant(_I32, 2), mask, _all(_WORDS, 0))


def _parts(builder: Any, bfloat16: bool, words: Any) -> list[Any]:
    """The numbers in 16 words as float32: low and high halves, or the words themselves."""
    if not bfloat16:
        return [builder.bitcast(words, _FLOATS)]
    low, high = builder.shl(words, _all(_WORDS, 16)), builder.and_(words, _all(_WORDS, 0xFFFF0000))
    return [builder.bitcast(half, _FLOATS) for half in (low, high)]


def _fold(builder: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Reduce 16 lanes to one number, halving: always the same tree."""
    width = LANES
    while width > 1:
        width //= 2
        index = ir.VectorType(_I32, width)
        halves = (ir.Constant(index, list(range(start, start + width))) for start in (0, width))
        vector = combine(*(builder.shuffle_vector(vector, vector, half) for half in halves))
    return builder.extract_element(vector, ir.Constant(_I32, 0))


def _exp2(builder: Any, x: Any) -> Any:
    """2^x for x <= 0 to about 1 ulp (Cephes' exp2f polynomial); 0 below 2^-126 and for -inf; NaN stays NaN."""
    x = _maximum(builder, _all(_FLOATS, -127.0), x)
    magic = _all(_FLOATS, float(3 << 22))  # adding it rounds x to an integer and leaves that in the low mantissa bits
    shifted = builder.fadd(x, magic)
    fraction = builder.fsub(x, builder.fsub(shifted, magic))
    power = _all(_FLOATS, np.float32(_EXP2[0]))
    for coefficient in _EXP2[1:]:
        power = _fma(builder, power, fraction, _all(_FLOATS, np.float32(coefficient)))
    exponent = builder.add(builder.bitcast(shifted, _WORDS), _all(_WORDS, 127))
    return builder.fmul(power, builder.bitcast(builder.shl(exponent, _all(_WORDS, 23)), _FLOATS))


_EXP2 = (
    1.535336188319500e-4, 1.339887440266574e-3, 9.618437357674640e-3, 5.550332471162809e-2,
    2.402264791363012e-1, 6.931472028550421e-1, 1.0,
)  # fmt: skip


def _by_dtype(builder: Any, bfloat16: Any, emit: Callable[[bool], None]) -> None:
    """Emit both versions; where this is inlined the flag is constant, so one of them vanishes."""
    for wide in (True, False):
        with builder.if_then(builder.icmp_signed("==", bfloat16, ir.Constant(bfloat16.type, int(wide)))):
            emit(wide)


def _by_heads(builder: Any, bfloat16: Any, heads: Any, emit: Callable[[bool, range], None]) -> None:
    """Emit straight-line code for every number of query heads."""

    def emit_all(wide: bool) -> None:
        for count in range(1, GROUP + 1):
            with builder.if_then(builder.icmp_signed("==", heads, _const(count))):
                emit(wide, range(count))

    _by_dtype(builder, bfloat16, emit_all)


@operation(_int, _int)
def _stack(builder: Any, size: Any) -> Any:
    """Uninitialised memory which lives until the kernel returns; never call it in a loop."""
    memory = builder.alloca(ir.ArrayType(ir.IntType(8), VECTOR), builder.udiv(size, _const(VECTOR)))
    memory.align = VECTOR
    return builder.ptrtoint(memory, _I64)


@operation(_int, _int, _int)
def _at(builder: Any, array: Any, index: Any) -> Any:
    return builder.sext(_load(builder, _address(builder, array, index, 4), _I32), _I64)


@operation(_void, _int, _int, _int)
def _put(builder: Any, array: Any, index: Any, value: Any) -> None:
    _store(builder, builder.trunc(value, _I32), _address(builder, array, index, 4))


@operation(_void, _int, _int)
def _prefetch(builder: Any, address: Any, size: Any) -> None:
    """Ask for the cache lines of a row: blocks lie anywhere, so the hardware cannot guess the next one."""
    lines = builder.udiv(builder.add(size, _const(CACHE_LINE - 1)), _const(CACHE_LINE))
    read, locality, data = (ir.Constant(_I32, value) for value in (0, 2, 1))
    with cgutils.for_range(builder, lines) as loop:
        line = builder.inttoptr(_address(builder, address, loop.index, CACHE_LINE), ir.PointerType(_I32))
        _call(builder, "llvm.prefetch.p0", ir.VoidType(), line, read, locality, data)


@operation(_void, _int, _int, _int, _int, _int)
def _transpose(builder: Any, slots: Any, source: Any, stride: Any, words: Any, target: Any) -> None:
    """Load the keys of 16 slots and store them word by word, 16 keys beside each other, 64 keys apart."""
    vectors = builder.udiv(builder.add(words, _const(LANES - 1)), _const(LANES))
    with cgutils.for_range(builder, vectors) as loop:
        first = builder.mul(loop.index, _const(LANES))
        mask = _leading(builder, builder.sub(words, first))
        rows = []
        for key in range(LANES):
            slot = builder.sext(_load(builder, slots, _I32, 4 * key), _I64)
            start = builder.add(_address(builder, source, slot, stride), builder.mul(first, _const(4)))
            rows.append(_load_words(builder, start, mask))
        for bit in (1, 2, 4, 8):
            for low in (row for row in range(LANES) if not row & bit):
                pair = rows[low], rows[low | bit]
                even = [lane if not lane & bit else LANES + lane - bit for lane in range(LANES)]
                odd = [lane + bit if not lane & bit else LANES + lane for lane in range(LANES)]
                rows[low], rows[low | bit] = (
                    builder.shuffle_vector(*pair, ir.Constant(_WORDS, lanes)) for lanes in (even, odd)
                )
        start = _address(builder, target, first, 4 * KEYS)
        for word, keys in enumerate(rows):
            _store(builder, keys, start, 4 * KEYS * word)


@operation(_void, _bool, _int, _int, _int, _int, _int)
def _start(builder: Any, bfloat16: Any, source: Any, words: Any, pitch: Any, scale: Any, state: Any) -> None:
    """Fresh state: the query times the scale, no weight, no maximum yet."""
    factor = _spread(builder, builder.bitcast(builder.trunc(scale, _I32), _F32))
    zero = _all(_FLOATS, 0.0)
    _store(builder, _all(_FLOATS, -math.inf), state)

    def emit(wide: bool) -> None:
        pitch_bytes = builder.mul(pitch, _const(4))
        query = builder.add(state, _const(VECTOR))
        sums = _address(builder, query, pitch_bytes, 2 if wide else 1)
        _store(builder, zero, sums)
        sums = builder.add(sums, _const(VECTOR))
        with cgutils.for_range(builder, builder.udiv(pitch, _const(LANES))) as loop:
            done = builder.mul(loop.index, _const(VECTOR))
            mask = _leading(builder, builder.sub(words, builder.mul(loop.index, _const(LANES))))
            loaded = _load_words(builder, builder.add(source, done), mask)
            for part, values in enumerate(_parts(builder, wide, loaded)):
                target = _address(builder, builder.add(query, done), pitch_bytes, part)
                _store(builder, builder.fmul(values, factor), target)
                _store(builder, zero, _address(builder, sums, done, 2 if wide else 1), VECTOR * part)

    _by_dtype(builder, bfloat16, emit)


@operation(_void, _bool, _int, _int, _int, _int, _int, _int, _int)
def _score(
    builder: Any, bfloat16: Any, heads: Any, state: Any, state_size: Any, words: Any, pitch: Any, keys: Any, scores: Any
) -> None:
    """Dot products of up to 4 queries with 64 transposed keys, summed in the order of the dimensions."""

    def emit(wide: bool, members: range) -> None:
        chunks = range(KEYS // LANES)
        sums = [[cgutils.alloca_once_value(builder, _all(_FLOATS, 0.0)) for _ in chunks] for _ in members]
        for chunk in (chunk for row in sums for chunk in row):
            builder.store(_all(_FLOATS, 0.0), chunk)
        first = builder.add(state, _const(VECTOR))
        queries = [_address(builder, first, _const(member), state_size) for member in members]
        with cgutils.for_range(builder, words) as loop:
            start = _address(builder, keys, loop.index, 4 * KEYS)
            columns = [_parts(builder, wide, _load(builder, start, _WORDS, VECTOR * chunk)) for chunk in chunks]
            for part in range(2 if wide else 1):
                index = builder.add(loop.index, builder.mul(pitch, _const(part)))
                for member in members:
                    number = _spread(builder, _load(builder, _address(builder, queries[member], index, 4), _F32))
                    for chunk in chunks:
                        total = sums[member][chunk]
                        builder.store(_fma(builder, number, columns[chunk][part], builder.load(total)), total)
        for member in members:
            for chunk in chunks:
                _store(builder, builder.load(sums[member][chunk]), scores, 4 * (KEYS * member + LANES * chunk))

    _by_heads(builder, bfloat16, heads, emit)


@operation(_void, _int, _int, _int, _int, _int)
def _soften(builder: Any, count: Any, state: Any, totals: Any, scores: Any, decay: Any) -> None:
    """One step of the online softmax: scores become weights, `decay` is what earlier sums are worth now."""
    chunks = range(KEYS // LANES)
    minus_infinity = _all(_FLOATS, -math.inf)
    values = []
    for chunk in chunks:
        exists = _leading(builder, builder.sub(count, _const(LANES * chunk)))
        values.append(builder.select(exists, _load(builder, scores, _FLOATS, VECTOR * chunk), minus_infinity))

    def larger(a: Any, b: Any) -> Any:
        return _maximum(builder, a, b)

    before = _load(builder, state, _FLOATS)
    best = larger(larger(values[0], values[1]), larger(values[2], values[3]))
    now = larger(_spread(builder, _fold(builder, best, larger)), before)
    weights = [_exp2(builder, builder.fsub(value, now)) for value in values]
    factor = _exp2(builder, builder.fsub(before, now))
    added = builder.fadd(builder.fadd(weights[0], weights[1]), builder.fadd(weights[2], weights[3]))
    _store(builder, _fma(builder, _load(builder, totals, _FLOATS), factor, added), totals)
    _store(builder, now, state)
    _store(builder, factor, decay)
    for chunk in chunks:
        _store(builder, weights[chunk], scores, VECTOR * chunk)


@operation(_void, _bool, _int, _int, _int, _int, _int, _int, _int, _int, _int, _int)
def _accumulate(
    builder: Any, bfloat16: Any, heads: Any, sums: Any, state_size: Any, words: Any,
    count: Any, slots: Any, source: Any, stride: Any, weights: Any, decays: Any,
) -> None:  # fmt: skip
    """sums <- sums * decay + weights of `count` keys times their values, key after key."""

    def emit(wide: bool, members: range) -> None:
        parts, vectors = range(2 if wide else 1), range(PANEL // LANES)
        panels = builder.udiv(builder.add(words, _const(PANEL - 1)), _const(PANEL))
        places = [(member, vector, part) for member in members for vector in vectors for part in parts]
        totals = {place: cgutils.alloca_once(builder, _FLOATS) for place in places}
        with cgutils.for_range(builder, panels) as outer:
            first = builder.mul(outer.index, _const(PANEL))
            masks = [_leading(builder, builder.sub(words, builder.add(first, _const(LANES * i)))) for i in vectors]
            panel = _address(builder, sums, outer.index, 4 * PANEL * len(parts))

            def place_address(place: tuple[int, int, int]) -> tuple[Any, int]:
                member, vector, part = place
                return _address(builder, panel, _const(member), state_size), VECTOR * (vector * len(parts) + part)

            for place in places:
                address, offset = place_address(place)
                factor = _load(builder, decays, _FLOATS, VECTOR * place[0])
                builder.store(builder.fmul(_load(builder, address, _FLOATS, offset), factor), totals[place])
            column = builder.add(source, builder.mul(first, _const(4)))
            with cgutils.for_range(builder, count) as loop:
                slot = builder.sext(_load(builder, _address(builder, slots, loop.index, 4), _I32), _I64)
                row = _address(builder, column, slot, stride)
                values = [
                    _parts(builder, wide, _load_words(builder, builder.add(row, _const(VECTOR * i)), masks[i]))
                    for i in vectors
                ]
                for member in members:
                    weight = _load(builder, _address(builder, weights, loop.index, 4), _F32, 4 * KEYS * member)
                    weight = _spread(builder, weight)
                    for vector in vectors:
                        for part in parts:
                            total = totals[member, vector, part]
                            builder.store(_fma(builder, weight, values[vector][part], builder.load(total)), total)
            for place in places:
                address, offset = place_address(place)
                _store(builder, builder.load(totals[place]), address, offset)

    _by_heads(builder, bfloat16, heads, emit)


@operation(_void, _bool, _int, _int, _int, _int)
def _finish(builder: Any, bfloat16: Any, totals: Any, sums: Any, words: Any, target: Any) -> None:
    """Divide by the total weight, round to nearest even, and store; zeros where there was no key."""
    total = _fold(builder, _load(builder, totals, _FLOATS), builder.fadd)
    empty = builder.fcmp_ordered("==", total, ir.Constant(_F32, 0.0))
    divisor = _spread(builder, builder.select(empty, ir.Constant(_F32, 1.0), total))

    def rounded(value: Any) -> Any:
        bits = builder.bitcast(value, _WORDS)
        even = builder.and_(builder.lshr(bits, _all(_WORDS, 16)), _all(_WORDS, 1))
        return builder.add(bits, builder.add(even, _all(_WORDS, 0x7FFF)))

    def emit(wide: bool) -> None:
        parts = range(2 if wide else 1)
        with cgutils.for_range(builder, builder.udiv(builder.add(words, _const(LANES - 1)), _const(LANES))) as loop:
            start = _address(builder, sums, loop.index, VECTOR * len(parts))
            values = [builder.fdiv(_load(builder, start, _FLOATS, VECTOR * part), divisor) for part in parts]
            if wide:
                low = builder.lshr(rounded(values[0]), _all(_WORDS, 16))
                result = builder.or_(low, builder.and_(rounded(values[1]), _all(_WORDS, 0xFFFF0000)))
            else:
                result = builder.bitcast(values[0], _WORDS)
            mask = _leading(builder, builder.sub(words, builder.mul(loop.index, _const(LANES))))
            pointer = builder.inttoptr(_address(builder, target, loop.index, VECTOR), ir.PointerType(_WORDS))
            _call(builder, "llvm.masked.store.v16i32.p0", ir.VoidType(), result, pointer, ir.Constant(_I32, 2), mask)

    _by_dtype(builder, bfloat16, emit)


# The loops: which rows, which keys ---------------------------------------------------------------------------------


@inlined
def _length(block: Any, row: int) -> int:
    """Number of keys of a row."""
    tail = block[_TAIL_INDPTR]
    return _at(block[_PREFIX_LENS], row) + _at(tail, row + 1) - _at(tail, row)  # type: ignore[no-any-return]


@inlined
def _read_table(block: Any, row: int, base: int, begin: int, end: int, slots: int) -> None:
    """slots[begin:end] = the slots of logical positions base + begin ... base + end of the row's sequence."""
    table = block[_BLOCK_TABLES] + 4 * block[_MAX_BLOCKS] * _at(block[_SEQUENCE], row)
    size = block[_BLOCK_SIZE]
    i = begin
    while i < end:
        number, offset = (base + i) // size, (base + i) % size
        first = _at(table, number) * size + offset - i
        stop = min(end, i + size - offset)
        while i < stop:
            _put(slots, i, first + i)
            i += 1


@inlined
def _read_tail(block: Any, row: int, base: int, begin: int, end: int, slots: int) -> None:
    """The same for logical positions past the prefix."""
    shift = _at(block[_TAIL_INDPTR], row) - _at(block[_PREFIX_LENS], row) + base
    for i in range(begin, end):
        _put(slots, i, _at(block[_TAIL_SLOTS], shift + i))


@inlined
def _hint(block: Any, head: int, slots: int, count: int, cursor: int) -> int:
    """Prefetch the next few of `count` keys, then values, of the block to come; returns the advanced cursor."""
    stop = min(cursor + HINTS, 2 * count)
    keys, values = block[_K] + head * block[_K_HEAD], block[_V] + head * block[_V_HEAD]
    for i in range(cursor, stop):
        if i < count:
            _prefetch(keys + _at(slots, i) * block[_K_SLOT], 4 * block[_WORDS_PER_ROW])
        else:
            _prefetch(values + _at(slots, i - count) * block[_V_SLOT], 4 * block[_WORDS_PER_ROW])
    return stop


@spliced
def _attend_rows(
    block: Any, bfloat16: bool, begin: int, end: int, head: int, next_row: int, next_head: int, memory: Any
) -> None:
    """Rows begin ... end of one sequence, one KV head; `next_row` and `next_head` will likely be needed next."""
    states, state_size, slots, keys, scores, decays, hints = memory
    group, words, pitch = block[_QUERIES_PER_HEAD], block[_WORDS_PER_ROW], _pitch(block)
    totals_at, sums_at = state_size // 2, state_size // 2 + VECTOR
    k, v = block[_K] + head * block[_K_HEAD], block[_V] + head * block[_V_HEAD]
    longest, known = 0, 0
    for row in range(begin, end):
        longest, known = max(longest, _length(block, row)), max(known, _at(block[_PREFIX_LENS], row))
        for member in range(group):
            query = block[_Q] + row * block[_Q_ROW] + (head * group + member) * block[_Q_HEAD]
            _start(bfloat16, query, words, pitch, block[_SCALE], states + ((row - begin) * group + member) * state_size)

    for base in range(0, longest, KEYS):
        if base + KEYS < longest:
            hint_head, hint_count = head, max(0, min(KEYS, known - base - KEYS))
            _read_table(block, begin, base + KEYS, 0, hint_count, hints)
        else:
            hint_head, hint_count = next_head, min(KEYS, _at(block[_PREFIX_LENS], next_row))
            _read_table(block, next_row, 0, 0, hint_count, hints)
        cursor = 0
        shared = min(KEYS, known - base)
        loaded = 0  # slots[:loaded] and their keys are the table's; beyond may lie another row's tail
        for row in range(begin, end):
            count = min(KEYS, _length(block, row) - base)
            if count <= 0:
                continue
            from_table = min(count, max(0, _at(block[_PREFIX_LENS], row) - base))
            fresh, stop = min(loaded, from_table), 0
            if from_table > loaded:
                _read_table(block, row, base, loaded, shared, slots)
                stop, loaded = shared, shared
            if from_table < count:
                _read_tail(block, row, base, from_table, count, slots)
                stop, loaded = count, from_table
            for lanes in range(fresh // LANES, (stop + LANES - 1) // LANES):
                cursor = _hint(block, hint_head, hints, hint_count, cursor)
                _transpose(slots + VECTOR * lanes, k, block[_K_SLOT], words, keys + VECTOR * lanes)
            for member in range(0, group, GROUP):
                together = min(GROUP, group - member)
                state = states + ((row - begin) * group + member) * state_size
                cursor = _hint(block, hint_head, hints, hint_count, cursor)
                _score(bfloat16, together, state, state_size, words, pitch, keys, scores)
                for i in range(together):
                    cursor = _hint(block, hint_head, hints, hint_count, cursor)
                    own = state + i * state_size
                    _soften(count, own, own + totals_at, scores + 4 * KEYS * i, decays + VECTOR * i)
                cursor = _hint(block, hint_head, hints, hint_count, cursor)
                _accumulate(
                    bfloat16, together, state + sums_at, state_size, words,
                    count, slots, v, block[_V_SLOT], scores, decays,
                )  # fmt: skip

    for row in range(begin, end):
        for member in range(group):
            state = states + ((row - begin) * group + member) * state_size
            target = block[_OUT] + row * block[_OUT_ROW] + (head * group + member) * block[_OUT_HEAD]
            _finish(bfloat16, state + totals_at, state + sums_at, words, target)


@inlined
def _pitch(block: Any) -> int:
    """Words of a row, rounded up to whole panels."""
    return (block[_WORDS_PER_ROW] + PANEL - 1) // PANEL * PANEL  # type: ignore[no-any-return]


@spliced
def _attend(block: Any, bfloat16: bool) -> None:
    state_size = 8 * _pitch(block) * (2 if bfloat16 else 1) + 2 * VECTOR
    step = max(1, TILE_STATES // block[_QUERIES_PER_HEAD])
    slots = _stack(4 * KEYS)
    memory = (
        _stack(step * block[_QUERIES_PER_HEAD] * state_size), state_size, slots, _stack(4 * KEYS * _pitch(block)),
        _stack(GROUP * 4 * KEYS), _stack(GROUP * VECTOR), _stack(4 * KEYS),
    )  # fmt: skip
    for i in range(KEYS):  # lanes past the last key load some slot: let it be one that exists
        _put(slots, i, 0)

    heads = block[_HEADS_PER_TASK]
    shares = block[_KV_HEADS] // heads
    while True:
        task = claim(block)
        if task >= block[TASKS]:
            return
        first, last = _at(block[_TILES], 2 * (task // shares)), _at(block[_TILES], 2 * (task // shares) + 1)
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
                        next_row, next_head = _at(block[_TILES], 2 * (guess // shares)), guess % shares * heads
                _attend_rows(block, bfloat16, begin, end, head, next_row, next_head, memory)


def _attend_bfloat16(block: Any) -> None:
    _attend(block, True)


def _attend_float32(block: Any) -> None:
    _attend(block, False)


_KERNELS = {torch.bfloat16: Kernel(_attend_bfloat16), torch.float32: Kernel(_attend_float32)}
