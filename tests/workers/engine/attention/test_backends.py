"""Every attention backend against the float64 reference."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from workers.engine.api.errors import UnsupportedModel
from workers.engine.api.request import Request
from workers.engine.attention.interface import load_attention, resolve_attention
from workers.engine.state.batch import Batch, Feed
from workers.engine.state.kv_cache import CacheShape, KVCache
from workers.engine.state.rows import Weighing
from workers.engine.state.sequence import Sequence
from workers.engine.state.tree import DraftTree

CPU = torch.device("cpu")
TREE = DraftTree((1, 2, 3, 4, 5, 6), (-1, -1, 0, 1, 3, 0))
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def open_sequence(cache: KVCache, index: int, length: int, room: int = 8) -> Sequence:
    seq = Sequence(Request(index, tuple(range(length))), index, frozenset(), 1000)
    cache.open(seq)
    assert cache.reserve(seq, length + room)
    return seq


def mixed_batch(cache: KVCache) -> Batch:
    """A prompt chunk, a single row, a long chain, a tree, and a tree whose first nodes are cached."""
    lengths = (37, 1, 90, 20, 12)
    a, b, c, d, e = (open_sequence(cache, index, length) for index, length in enumerate(lengths))
    feeds = [
        Feed(a, 5, 30),
        Feed(b, 0, 1),
        Feed(c, 89, 90, DraftTree.chain((7, 8, 9))),
        Feed(d, 17, 20, TREE),
        Feed(e, 12, 12, TREE, first_node=2),
    ]
    return Batch.pack(feeds, cache)


def filled_cache(dtype: torch.dtype, heads: int, width: int) -> KVCache:
    cache = KVCache(CacheShape.uniform(2, heads, width, dtype, CPU), 40, 16, prefix_reuse=False)
    torch.manual_seed(0)
    for pool in (*cache.keys, *cache.values):
        pool.copy_(torch.randn(pool.shape))
    return cache


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(9, 3, 64), (4, 4, 8), (8, 1, 24)])
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("sdpa", torch.float64),
        ("sdpa", torch.float32),
        ("sdpa", torch.bfloat16),
        ("numba", torch.float32),
        ("numba", torch.bfloat16),
    ],
)
def test_backend_gives_what_the_reference_gives(
    backend: str, dtype: torch.dtype, heads: int, kv_heads: int, width: int
) -> None:
    cache = filled_cache(dtype, kv_heads, width)
    batch = mixed_batch(cache)
    q = torch.randn(len(batch.input_ids), heads, width).to(dtype)
    expected = load_attention("reference").prepare(batch, cache).attend(q, 1, 0.3)
    plan = load_attention(backend).prepare(batch, cache)
    torch.testing.assert_close(plan.attend(q, 1, 0.3), expected, rtol=0, atol=TOLERANCE[dtype])


WEIGHINGS = {
    "window": Weighing(window=19),
    "window of a block": Weighing(window=64),
    "window of one": Weighing(window=1),
    "window, softcap": Weighing(window=70, softcap=1.5),
    "sinks": Weighing(sinks=torch.linspace(-3, 4, 9)),
    "window, sinks": Weighing(window=33, sinks=torch.linspace(-3, 4, 9)),
    "slopes": Weighing(slopes=torch.logspace(-2, 0, 9)),
    "everything": Weighing(30, 2.0, torch.logspace(-2, 0, 9), torch.linspace(-3, 4, 9)),
}


@pytest.mark.parametrize("name", WEIGHINGS)
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [("sdpa", torch.float64), ("sdpa", torch.bfloat16), ("numba", torch.float32), ("numba", torch.bfloat16)],
)
def test_backend_weighs_as_the_reference_does(backend: str, dtype: torch.dtype, name: str) -> None:
    """Blocks behind every row's window may be anybody's: what stands in the scratch block is never part of a sum."""
    cache, weighing = filled_cache(dtype, 3, 24), WEIGHINGS[name]
    batch = mixed_batch(cache)
    q = torch.randn(len(batch.input_ids), 9, 24).to(dtype)
    expected = load_attention("reference").prepare(batch, cache).attend(q, 1, 0.3, weighing)
    if weighing.window is not None:
        behind = np.array([5, 0, 90, 17, 12]) + 1 - weighing.window
        for table, count in zip(batch.rows.block_tables, behind // cache.block_size, strict=True):
            table[: max(0, count)] = 0
        for pool in (*cache.keys, *cache.values):
            pool[: cache.block_size] = torch.nan if backend == "numba" else 1e9
    got = load_attention(backend).prepare(batch, cache).attend(q, 1, 0.3, weighing)
    torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE[dtype])


def test_reference_weighs_by_the_definition() -> None:
    cache = filled_cache(torch.float64, 3, 8)
    seq = open_sequence(cache, 0, 21)
    batch = Batch.pack([Feed(seq, 10, 21, TREE)], cache)
    q, weighing = torch.randn(17, 9, 8, dtype=torch.float64), WEIGHINGS["everything"]
    out = load_attention("reference").prepare(batch, cache).attend(q, 0, 0.3, weighing)
    assert weighing.window
    assert weighing.softcap
    assert weighing.slopes is not None
    assert weighing.sinks is not None
    places = [list(range(position + 1)) for position in range(10, 21)]
    places += [[*range(21), *(21 + ancestor for ancestor in TREE.path(node))] for node in range(len(TREE))]
    for row, places_of_row in enumerate(places):
        slots = [cache.slot(seq, place) for place in places_of_row]
        for head in range(9):
            weights, total, own = {}, float(weighing.sinks[head].double().exp()), len(slots) - 1
            for position in range(max(0, own - weighing.window + 1), own + 1):
                score = 0.3 * float(q[row, head] @ cache.keys[0][slots[position], head // 3])
                score = weighing.softcap * math.tanh(score / weighing.softcap)
                score -= float(weighing.slopes[head].double()) * (own - position)
                weights[position] = math.exp(score)
                total += weights[position]
            value = sum(weight / total * cache.values[0][slots[at], head // 3] for at, weight in weights.items())
            torch.testing.assert_close(out[row, head], value, rtol=0, atol=1e-12)


def test_reference_attends_to_the_path_of_a_node_and_nothing_else() -> None:
    cache = filled_cache(torch.float64, 1, 4)
    seq = open_sequence(cache, 0, 3)
    batch = Batch.pack([Feed(seq, 2, 3, TREE)], cache)
    # With a query of zeros all keys weigh the same, so the result is the mean of the values that a row sees.
    out = load_attention("reference").prepare(batch, cache).attend(torch.zeros(7, 1, 4, dtype=torch.float64), 0, 1.0)
    for node in range(len(TREE)):
        positions = [0, 1, 2, *(3 + ancestor for ancestor in TREE.path(node))]
        seen = cache.values[0][[cache.slot(seq, position) for position in positions]]
        torch.testing.assert_close(out[1 + node, 0], seen.mean(dim=0)[0])


def test_attend_does_not_change_the_cache() -> None:
    cache = filled_cache(torch.float32, 2, 16)
    batch = mixed_batch(cache)
    before = [pool.clone() for pool in cache.keys]
    for backend in ("reference", "sdpa", "numba"):
        load_attention(backend).prepare(batch, cache).attend(torch.randn(len(batch.input_ids), 4, 16), 0, 1.0)
    assert all(torch.equal(pool, old) for pool, old in zip(cache.keys, before, strict=True))


def test_auto_takes_the_best_backend_of_the_device() -> None:
    cuda = torch.device("cuda")
    assert resolve_attention("auto", CPU, torch.bfloat16) == "numba"
    assert resolve_attention("auto", CPU, torch.float64) == "sdpa"
    assert resolve_attention("auto", cuda, torch.bfloat16) == "sdpa"
    assert resolve_attention("reference", CPU, torch.float64) == "reference"


@pytest.mark.parametrize(
    ("name", "device", "dtype", "message"),
    [
        ("numba", "cuda", torch.bfloat16, "runs on the CPU"),
        ("numba", "cpu", torch.float64, "float32 and bfloat16"),
        ("fast", "cpu", torch.float32, "unknown; known: auto, numba"),
    ],
)
def test_backends_that_cannot_run_are_refused(name: str, device: str, dtype: torch.dtype, message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        resolve_attention(name, torch.device(device), dtype)


def test_padding_rows_see_the_scratch_block_alone() -> None:
    cache = filled_cache(torch.float32, 1, 8)
    batch = Batch.pack([Feed(open_sequence(cache, 0, 2), 1, 2)], cache)
    assert batch.num_rows == 1
    assert len(batch.input_ids) == 4
    q = torch.randn(4, 2, 8)
    for backend in ("reference", "sdpa", "numba"):
        out = load_attention(backend).prepare(batch, cache).attend(q, 0, 1.0)
        np.testing.assert_allclose(out[1:], cache.values[0][0, 0].expand(3, 2, 8), rtol=1e-5)
