"""Vector code of the attention kernel, written in LLVM's own words.

Explicit 16-lane vectors without fastmath: the compiler may move instructions but not change an order of summation. A
*word* is 32 bits of a cached row: one float32, or two bfloat16, which widen by a shift and a mask.

Addresses are plain integers. The state of one (row, query head), by byte:
    [0, 64)               running maximum, the same in 16 lanes
    [64, 64 + Q)          scaled query, float32 [parts, pitch]: number w of part p meets part p of a key's word w
    [64 + Q, 128 + Q)     total weight, 16 partial sums
    [128 + Q, 128 + 2Q)   weighted sum of values, float32 [pitch / 16, parts, 16]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils

from workers.engine.kernels.cpu.runtime import operation

KEYS = 64
"""Logical positions per softmax block. Part of the definition of the result: changing it changes low-order bits."""
LANES = 16
VECTOR = 4 * LANES
"""Bytes of one vector."""
PANEL = 2 * LANES
"""Words of a value row which are summed together: with four heads they fill the registers."""
GROUP = 4
"""Query heads computed together from one loaded key or value."""
CACHE_LINE = 64

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
def stack(builder: Any, size: Any) -> Any:
    """Uninitialised memory which lives until the kernel returns; never call it in a loop."""
    memory = builder.alloca(ir.ArrayType(ir.IntType(8), VECTOR), builder.udiv(size, _const(VECTOR)))
    memory.align = VECTOR
    return builder.ptrtoint(memory, _I64)


@operation(_int, _int, _int)
def at(builder: Any, array: Any, index: Any) -> Any:
    return builder.sext(_load(builder, _address(builder, array, index, 4), _I32), _I64)


@operation(_void, _int, _int, _int)
def put(builder: Any, array: Any, index: Any, value: Any) -> None:
    _store(builder, builder.trunc(value, _I32), _address(builder, array, index, 4))


@operation(_void, _int, _int)
def prefetch(builder: Any, address: Any, size: Any) -> None:
    """Ask for the cache lines of a row: blocks lie anywhere, so the hardware cannot guess the next one."""
    lines = builder.udiv(builder.add(size, _const(CACHE_LINE - 1)), _const(CACHE_LINE))
    read, locality, data = (ir.Constant(_I32, value) for value in (0, 2, 1))
    with cgutils.for_range(builder, lines) as loop:
        line = builder.inttoptr(_address(builder, address, loop.index, CACHE_LINE), ir.PointerType(_I32))
        _call(builder, "llvm.prefetch.p0", ir.VoidType(), line, read, locality, data)


@operation(_void, _int, _int, _int, _int, _int)
def transpose(builder: Any, slots: Any, source: Any, stride: Any, words: Any, target: Any) -> None:
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
def start(builder: Any, bfloat16: Any, source: Any, words: Any, pitch: Any, scale: Any, state: Any) -> None:
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
def score(
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


@operation(_void, _int, _int, _int)
def sink(builder: Any, state: Any, totals: Any, score: Any) -> None:
    """Let the weights begin with that of a key without a value."""
    _store(builder, _spread(builder, builder.bitcast(builder.trunc(score, _I32), _F32)), state)
    _store(builder, ir.Constant(_FLOATS, [1.0] + [0.0] * (LANES - 1)), totals)


@operation(_void, _int, _int, _int)
def cap(builder: Any, scores: Any, limit: Any, steepness: Any) -> None:
    """Bend 64 scores s to limit * tanh(s / limit); `steepness` is 2 log2(e) / limit."""
    one = _all(_FLOATS, 1.0)
    largest, steep = (
        _spread(builder, builder.bitcast(builder.trunc(number, _I32), _F32)) for number in (limit, steepness)
    )
    for chunk in range(KEYS // LANES):
        words = _load(builder, scores, _WORDS, VECTOR * chunk)
        sign = builder.and_(words, _all(_WORDS, 0x80000000))
        size = builder.bitcast(builder.xor(words, sign), _FLOATS)
        rest = _exp2(builder, builder.fneg(builder.fmul(size, steep)))
        bent = builder.fmul(largest, builder.fdiv(builder.fsub(one, rest), builder.fadd(one, rest)))
        _store(builder, builder.or_(builder.bitcast(bent, _WORDS), sign), scores, VECTOR * chunk)


@operation(_void, _int, _int, _int)
def tilt(builder: Any, scores: Any, slope: Any, first: Any) -> None:
    """Add slope * (first + i) to score i of 64."""
    steep = _spread(builder, builder.bitcast(builder.trunc(slope, _I32), _F32))
    for chunk in range(KEYS // LANES):
        lanes = ir.Constant(_WORDS, list(range(LANES * chunk, LANES * (chunk + 1))))
        distance = builder.sitofp(builder.add(_spread(builder, builder.trunc(first, _I32)), lanes), _FLOATS)
        tilted = _fma(builder, steep, distance, _load(builder, scores, _FLOATS, VECTOR * chunk))
        _store(builder, tilted, scores, VECTOR * chunk)


@operation(_void, _int, _int, _int, _int, _int, _int)
def soften(builder: Any, first: Any, count: Any, state: Any, totals: Any, scores: Any, decay: Any) -> None:
    """One step of the online softmax: scores [first, count) become weights, the rest of 64 zero; `decay` is what
    earlier sums are worth now."""
    chunks = range(KEYS // LANES)
    minus_infinity = _all(_FLOATS, -math.inf)
    values = []
    for chunk in chunks:
        exists = _leading(builder, builder.sub(count, _const(LANES * chunk)))
        before = _leading(builder, builder.sub(first, _const(LANES * chunk)))
        exists = builder.and_(exists, builder.not_(before))
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


@operation(_void, _bool, _int, _int, _int, _int, _int, _int, _int, _int, _int, _int, _int)
def accumulate(
    builder: Any, bfloat16: Any, heads: Any, sums: Any, state_size: Any, words: Any,
    first: Any, count: Any, slots: Any, source: Any, stride: Any, weights: Any, decays: Any,
) -> None:  # fmt: skip
    """sums <- sums * decay + weights of the keys [first, count) times their values, key after key."""

    def emit(wide: bool, members: range) -> None:
        parts, vectors = range(2 if wide else 1), range(PANEL // LANES)
        panels = builder.udiv(builder.add(words, _const(PANEL - 1)), _const(PANEL))
        places = [(member, vector, part) for member in members for vector in vectors for part in parts]
        totals = {place: cgutils.alloca_once(builder, _FLOATS) for place in places}
        with cgutils.for_range(builder, panels) as outer:
            word = builder.mul(outer.index, _const(PANEL))
            masks = [_leading(builder, builder.sub(words, builder.add(word, _const(LANES * i)))) for i in vectors]
            panel = _address(builder, sums, outer.index, 4 * PANEL * len(parts))

            def place_address(place: tuple[int, int, int]) -> tuple[Any, int]:
                member, vector, part = place
                return _address(builder, panel, _const(member), state_size), VECTOR * (vector * len(parts) + part)

            for place in places:
                address, offset = place_address(place)
                factor = _load(builder, decays, _FLOATS, VECTOR * place[0])
                builder.store(builder.fmul(_load(builder, address, _FLOATS, offset), factor), totals[place])
            column = builder.add(source, builder.mul(word, _const(4)))
            with cgutils.for_range(builder, count, first) as loop:
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
def finish(builder: Any, bfloat16: Any, totals: Any, sums: Any, words: Any, target: Any) -> None:
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
