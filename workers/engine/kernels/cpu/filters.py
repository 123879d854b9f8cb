"""Top-k, top-p and min-p without sorting a vocabulary, for use inside kernels.

A *shift* is a logit's distance below its row's maximum divided by the temperature, in float32: log p up to a constant,
at most 0. Tokens are ordered by (shift descending, id ascending); a *rank* is a uint64 that sorts so and holds both.

A histogram over the shifts tells which bin the last kept token lies in. The tokens of the bins before it are kept as
they are, and only those of that bin are sorted. Masses are summed in float64 in an order fixed by the row alone.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from workers.engine.kernels.cpu.floats import exp, exp_all
from workers.engine.kernels.cpu.runtime import inlined

BINS = 1024
"""Of width 1/16; the last takes all shifts below -64, which is mass that float32 probabilities hardly see."""


@inlined
def token_of(rank: Any) -> Any:
    return np.int64(rank & np.uint64(0xFFFFFFFF))


@inlined
def shift_of(rank: Any) -> Any:
    return -np.uint32(rank >> np.uint64(32)).view(np.float32)


@inlined
def mass_of(ranks: Any) -> Any:
    """Sum of e**shift."""
    mass = 0.0
    for i in range(len(ranks)):
        mass += np.float64(exp(shift_of(ranks[i])))
    return mass


@inlined
def keep(row: Any, shifts: Any, weights: Any, histogram: Any, ranks: Any, edge: Any) -> Any:
    """Write the ranks of the tokens that pass the filters of `row`, in no particular order; returns how many.

    The first top_k; of these the first whose mass reaches top_p of theirs; of these the ones with at least min_p of the
    best one's probability. `weights`, `histogram`, `ranks` and `edge` are scratch of V, BINS, V and V numbers.
    """
    if row.top_k > 0:
        count = _first_k(row, shifts, histogram, ranks, edge)
        if row.top_p < 1.0:
            count = _first_p_of(row, count, histogram, ranks, edge)
    elif row.top_p < 1.0:
        count = _first_p(row, shifts, weights, histogram, ranks, edge)
    else:
        lowest = min(_bin(np.float32(math.log(row.min_p))) + 1, BINS - 1)
        count, _ = _collect(shifts, lowest + 1, ranks, edge)
    if row.min_p > 0.0:
        count = _not_below(row.min_p, count, ranks)
    return count


@inlined
def _first_k(row: Any, shifts: Any, histogram: Any, ranks: Any, edge: Any) -> Any:
    histogram[:] = 0.0
    for i in range(len(shifts)):
        histogram[_bin(shifts[i])] += 1.0
    last, _ = _reaching(histogram, np.float64(row.top_k))
    count, at_edge = _collect(shifts, last, ranks, edge)
    edge[:at_edge].sort()
    for i in range(min(at_edge, row.top_k - count)):
        ranks[count + i] = edge[i]
    return min(count + at_edge, row.top_k)


@inlined
def _first_p(row: Any, shifts: Any, weights: Any, histogram: Any, ranks: Any, edge: Any) -> Any:
    exp_all(shifts, weights)
    histogram[:] = 0.0
    for i in range(len(shifts)):
        histogram[_bin(shifts[i])] += np.float64(weights[i])
    wanted = row.top_p * histogram.sum()
    last, before = _reaching(histogram, wanted)
    count, at_edge = _collect(shifts, last, ranks, edge)
    return _append_mass(count, at_edge, wanted - before, ranks, edge)


@inlined
def _first_p_of(row: Any, count: Any, histogram: Any, ranks: Any, edge: Any) -> Any:
    """As `_first_p`, for the `count` tokens in `ranks`."""
    histogram[:] = 0.0
    for i in range(count):
        shift = shift_of(ranks[i])
        histogram[_bin(shift)] += np.float64(exp(shift))
    wanted = row.top_p * histogram.sum()
    last, before = _reaching(histogram, wanted)
    kept = at_edge = 0
    for i in range(count):
        index = _bin(shift_of(ranks[i]))
        if index < last:
            ranks[kept] = ranks[i]
            kept += 1
        elif index == last:
            edge[at_edge] = ranks[i]
            at_edge += 1
    return _append_mass(kept, at_edge, wanted - before, ranks, edge)


@inlined
def _append_mass(count: Any, at_edge: Any, wanted: Any, ranks: Any, edge: Any) -> Any:
    """Move the first of the `at_edge` tokens in `edge` whose mass reaches `wanted` (all, if it does not) to `ranks`."""
    edge[:at_edge].sort()
    reached = 0.0
    for i in range(at_edge):
        ranks[count] = edge[i]
        count += 1
        reached += np.float64(exp(shift_of(edge[i])))
        if reached >= wanted:
            break
    return count


@inlined
def _not_below(min_p: Any, count: Any, ranks: Any) -> Any:
    kept = 0
    for i in range(count):
        if exp(shift_of(ranks[i])) >= min_p:
            ranks[kept] = ranks[i]
            kept += 1
    return kept


@inlined
def _bin(shift: Any) -> Any:
    depth = -shift * np.float32(BINS / 64)
    return int(depth) if depth < np.float32(BINS - 1) else BINS - 1


@inlined
def _reaching(histogram: Any, wanted: Any) -> Any:
    """(first bin at which the running sum is `wanted`, or the last one; the sum of the bins before it)."""
    before = 0.0
    for index in range(BINS - 1):
        if before + histogram[index] >= wanted:
            return index, before
        before += histogram[index]
    return BINS - 1, before


@inlined
def _collect(shifts: Any, last: Any, ranks: Any, edge: Any) -> Any:
    """Ranks of the tokens in bins before `last` to `ranks`, of those in it to `edge`; returns how many went where."""
    floor = np.float32(-(last + 1)) / np.float32(BINS / 64) if last < BINS - 1 else np.float32(-np.inf)
    count = at_edge = 0
    for i in range(len(shifts)):
        shift = shifts[i]
        if shift > floor:
            depth = np.float32(shift).view(np.uint32) & np.uint32(0x7FFFFFFF)
            rank = (np.uint64(depth) << np.uint64(32)) | np.uint64(i)
            if _bin(shift) < last:
                ranks[count] = rank
                count += 1
            else:
                edge[at_edge] = rank
                at_edge += 1
    return count, at_edge
