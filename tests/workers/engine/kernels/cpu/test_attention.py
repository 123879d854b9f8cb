"""The attention kernel against a float64 reference, and bit for bit against itself in every other arrangement."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from workers.engine.kernels.cpu import runtime
from workers.engine.kernels.cpu.attention import paged_attention, tiles
from workers.engine.state.rows import PLAIN, AttentionRows, Weighing

DTYPES = [torch.bfloat16, torch.float32]
BLOCK_SIZE = 16
SLOPES, SINKS = torch.logspace(-2, 0, 9), torch.linspace(-2, 3, 9)
WEIGHINGS = [
    pytest.param(PLAIN, id="plain"),
    pytest.param(Weighing(window=100), id="window"),
    pytest.param(Weighing(window=37, softcap=2.0, slopes=SLOPES, sinks=SINKS), id="everything"),
]


@dataclass(frozen=True)
class Pool:
    """Random keys and values in slots, and the slots of each sequence's logical positions."""

    k: torch.Tensor  # [slots, Hk, D]
    v: torch.Tensor
    tables: np.ndarray  # [B, max_blocks]
    block_size: int

    def slots(self, sequence: int, length: int) -> list[int]:
        positions = np.arange(length)
        blocks = self.tables[sequence, positions // self.block_size]
        return list(map(int, blocks * self.block_size + positions % self.block_size))


def make_pool(
    dtype: torch.dtype, lengths: Sequence[int], kv_heads: int = 3, width: int = 64, block_size: int = BLOCK_SIZE
) -> Pool:
    generator = torch.Generator().manual_seed(len(lengths) * 1009 + width)
    blocks = -(-max(lengths) // block_size)
    total = blocks * len(lengths) + 4
    tables = torch.randperm(total, generator=generator)[: blocks * len(lengths)].reshape(-1, blocks).int().numpy()
    shape = (total * block_size, kv_heads, width)
    k, v = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    return Pool(k, v, tables, block_size)


def queries(dtype: torch.dtype, rows: int, heads: int = 9, width: int = 64) -> torch.Tensor:
    return (2 * torch.randn(rows, heads, width, generator=torch.Generator().manual_seed(rows))).to(dtype)


def make_rows(
    pool: Pool, sequence: Sequence[int], prefix_lens: Sequence[int], tails: Sequence[Sequence[int]] | None = None
) -> AttentionRows:
    tails = [()] * len(sequence) if tails is None else tails
    return AttentionRows(
        sequence=np.array(sequence, np.int32),
        prefix_lens=np.array(prefix_lens, np.int32),
        tail_indptr=np.cumsum([0, *map(len, tails)], dtype=np.int32),
        tail_slots=np.array([slot for tail in tails for slot in tail], np.int32),
        block_tables=pool.tables,
        block_size=pool.block_size,
    )


def attend(pool: Pool, q: torch.Tensor, rows: AttentionRows, weighing: Weighing = PLAIN) -> torch.Tensor:
    out = torch.full_like(q, torch.nan)
    paged_attention(q, pool.k, pool.v, rows, q.shape[-1] ** -0.5, out, weighing)
    return out


def reference(pool: Pool, q: torch.Tensor, keys: Sequence[Sequence[int]]) -> torch.Tensor:
    """Row by row in float64; `keys` lists each row's slots."""
    group = q.shape[1] // pool.k.shape[1]
    out = torch.zeros(q.shape, dtype=torch.float64)
    for row, slots in enumerate(keys):
        if slots:
            k, v = (cache[list(slots)].double().repeat_interleave(group, 1) for cache in (pool.k, pool.v))
            weights = (torch.einsum("hd,khd->hk", q[row].double(), k) * q.shape[-1] ** -0.5).softmax(-1)
            out[row] = torch.einsum("hk,khd->hd", weights, v)
    return out


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "block_size", "lengths"),
    [
        pytest.param(9, 3, 64, 16, [200, 1, 64, 65, 63], id="SmolLM2"),
        pytest.param(32, 8, 128, 256, [300, 17], id="Llama-3"),
        pytest.param(5, 5, 80, 7, [129, 40], id="no grouping, odd block size, width 80"),
        pytest.param(14, 2, 96, 64, [70], id="seven queries a head"),
        pytest.param(8, 1, 6, 1, [130, 2], id="tiny width, one KV head, one slot a block"),
        pytest.param(71, 1, 256, 32, [90], id="more queries a head than a tile has states"),
    ],
)
def test_agrees_with_float64(
    dtype: torch.dtype, heads: int, kv_heads: int, width: int, block_size: int, lengths: list[int]
) -> None:
    pool = make_pool(dtype, lengths, kv_heads, width, block_size)
    q = queries(dtype, len(lengths), heads, width)
    out = attend(pool, q, make_rows(pool, range(len(lengths)), lengths))
    expected = reference(pool, q, [pool.slots(i, length) for i, length in enumerate(lengths)])
    torch.testing.assert_close(out.double(), expected, rtol=2**-8 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def test_rounds_to_nearest_even() -> None:
    """One key: the output is the value itself in float32, and a mean of two values needs rounding."""
    pool = make_pool(torch.bfloat16, [2], 1, 64)
    q = torch.zeros(1, 1, 64, dtype=torch.bfloat16)
    both = pool.slots(0, 2)
    assert torch.equal(attend(pool, q, make_rows(pool, [0], [1]))[0], pool.v[both[0]])
    mean = pool.v[both].float().sum(0) / 2
    assert torch.equal(attend(pool, q, make_rows(pool, [0], [2]))[0], mean.bfloat16())


@pytest.mark.parametrize("weighing", WEIGHINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_feel_each_other(dtype: torch.dtype, weighing: Weighing) -> None:
    lengths = [200, 64, 65, 1, 130, 127, 128, 129]
    pool = make_pool(dtype, lengths)
    sequence = [i for i in range(len(lengths)) for _ in range(3)]
    prefix_lens = [max(1, lengths[i] - j) for i in range(len(lengths)) for j in (2, 1, 0)]
    q = queries(dtype, len(sequence))
    together = attend(pool, q, make_rows(pool, sequence, prefix_lens), weighing)
    for row in range(len(sequence)):
        alone = attend(pool, q[row : row + 1], make_rows(pool, [sequence[row]], [prefix_lens[row]]), weighing)
        assert torch.equal(alone[0], together[row])
    order = torch.randperm(len(sequence), generator=torch.Generator().manual_seed(5)).tolist()
    shuffled = make_rows(pool, [sequence[i] for i in order], [prefix_lens[i] for i in order])
    assert torch.equal(attend(pool, q[order], shuffled, weighing), together[order])


@pytest.mark.parametrize("weighing", WEIGHINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_in_chunks_equals_prefill_at_once(dtype: torch.dtype, weighing: Weighing) -> None:
    length = 150
    pool = make_pool(dtype, [length])
    q = queries(dtype, length)
    whole = attend(pool, q, make_rows(pool, [0] * length, range(1, length + 1)), weighing)
    if weighing.is_plain:
        expected = reference(pool, q, [pool.slots(0, t + 1) for t in range(length)])
        torch.testing.assert_close(whole.double(), expected, rtol=2**-8, atol=1e-5)
    for size in (1, 7, 64):
        for start in range(0, length, size):
            part = range(start, min(start + size, length))
            rows = make_rows(pool, [0] * len(part), [t + 1 for t in part])
            assert torch.equal(attend(pool, q[part.start : part.stop], rows, weighing), whole[part.start : part.stop])


@pytest.mark.parametrize("weighing", WEIGHINGS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("prefix", [0, 1, 15, 40, 60, 63, 64, 100])
def test_tree_equals_its_paths(dtype: torch.dtype, prefix: int, weighing: Weighing) -> None:
    """A node that finds its ancestors through its tail has the bits of the same path at canonical slots."""
    parents = [-1, 0, 0, 1, 1, 2, 3, 6, 7, 8, 9, 10, 5]
    pool = make_pool(dtype, [prefix + len(parents), 8])
    free = [int(slot) for slot in np.setdiff1d(np.arange(len(pool.k)), pool.slots(0, prefix + len(parents)))]
    node_slots = free[: len(parents)]
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    tails = [[node_slots[i] for i in path] for path in paths]
    q = queries(dtype, len(parents))
    tree = attend(pool, q, make_rows(pool, [0] * len(parents), [prefix] * len(parents), tails), weighing)
    mixed = [1, 3, 0, 2]  # rows with and without tails share a tile; node 0 may also sit in the table
    for node, path in enumerate(paths):
        canonical = pool.slots(0, prefix + len(path))
        k, v = pool.k.clone(), pool.v.clone()
        for slot, ancestor in zip(canonical[prefix:], path, strict=True):
            k[slot], v[slot] = pool.k[node_slots[ancestor]], pool.v[node_slots[ancestor]]
        committed = Pool(k, v, pool.tables, pool.block_size)
        chain = attend(committed, q[node : node + 1], make_rows(pool, [0], [prefix + len(path)]), weighing)
        assert torch.equal(chain[0], tree[node]), node
        table_rows = [prefix + len(path), prefix, prefix + 1, prefix]
        rows = make_rows(pool, [0] * 4, table_rows, [[], tails[node], tails[node][1:], tails[0]])
        repeated = attend(committed, q[[node, node, node, 0]], rows, weighing)
        for row in (0, 1, 2):
            assert torch.equal(repeated[row], tree[node]), (node, row)
        assert torch.equal(repeated[3], tree[0])
    rows = make_rows(pool, [0] * 4, [prefix] * 4, [tails[i] for i in mixed])
    assert torch.equal(attend(pool, q[mixed], rows, weighing), tree[mixed])


def test_sequences_may_share_blocks() -> None:
    pool = make_pool(torch.bfloat16, [100, 100])
    shared = Pool(pool.k, pool.v, np.repeat(pool.tables[:1], 2, axis=0), pool.block_size)
    q = queries(torch.bfloat16, 1).repeat(2, 1, 1)
    out = attend(shared, q, make_rows(shared, [0, 1], [100, 100]))
    assert torch.equal(out[0], out[1])


def test_padding_rows_are_zero() -> None:
    pool = make_pool(torch.bfloat16, [70])
    q = queries(torch.bfloat16, 3)
    out = attend(pool, q, make_rows(pool, [0, 0, 0], [70, 0, 0]))
    assert torch.equal(out[1:], torch.zeros_like(out[1:]))
    assert torch.equal(out[:1], attend(pool, q[:1], make_rows(pool, [0], [70])))
    attend(pool, q[:0], make_rows(pool, [], []))


def test_keys_of_others_do_not_leak() -> None:
    """Nothing outside a row's own list is ever part of its arithmetic, not even times zero."""
    pool = make_pool(torch.float32, [100])
    q = queries(torch.float32, 100)
    clean = attend(pool, q, make_rows(pool, [0] * 100, range(1, 101)))
    own = pool.slots(0, 100)
    poisoned = torch.ones(len(pool.k), dtype=torch.bool)
    poisoned[own[:90]] = False
    pool.k[poisoned], pool.v[poisoned] = torch.nan, torch.inf
    dirty = attend(pool, q, make_rows(pool, [0] * 100, range(1, 101)))
    assert torch.equal(dirty[:90], clean[:90])
    assert dirty[90:].isnan().all()


def test_extreme_scores() -> None:
    pool = make_pool(torch.float32, [130])
    q = 1e4 * queries(torch.float32, 1)
    out = attend(pool, q, make_rows(pool, [0], [130]))
    torch.testing.assert_close(
        out.double(), reference(pool, q, [pool.slots(0, 130)]), rtol=1e-2, atol=1e-2, equal_nan=False
    )


@pytest.mark.parametrize("sign", [-1, 1])
def test_large_scores_meet_the_cap(sign: int) -> None:
    """Capped scores of equal size weigh the same, whatever the sums they come from."""
    pool = make_pool(torch.float32, [70], 1)
    pool.k[:] = sign * pool.k.abs()
    out = attend(pool, torch.full((1, 1, 64), 1e3), make_rows(pool, [0], [70]), Weighing(softcap=5.0))
    torch.testing.assert_close(out[0, 0], pool.v[pool.slots(0, 70), 0].mean(0), rtol=0, atol=1e-6)


def test_reads_strided_tensors() -> None:
    """q and out may be slices of a fused projection, the caches slices of a pool with a larger slot stride."""
    pool = make_pool(torch.bfloat16, [90, 33])
    q = queries(torch.bfloat16, 2)
    rows = make_rows(pool, [0, 1], [90, 33])
    expected = attend(pool, q, rows)
    fused = torch.zeros(2, 15, 64, dtype=torch.bfloat16)
    fused[:, 3:12] = q
    both = torch.stack([pool.k, pool.v], dim=1)
    out = torch.zeros(2, 10, 64, dtype=torch.bfloat16)
    paged_attention(fused[:, 3:12], both[:, 0], both[:, 1], rows, 64**-0.5, out[:, 1:])
    assert torch.equal(out[:, 1:], expected)
    assert not out[:, 0].any()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_threads_do_not_matter(count: int) -> None:
    lengths = [3 * i + 1 for i in range(40)]
    pool = make_pool(torch.bfloat16, lengths)
    q = queries(torch.bfloat16, len(lengths))
    rows = make_rows(pool, range(len(lengths)), lengths)
    with threads(1):
        expected = attend(pool, q, rows)
    with threads(count):
        assert torch.equal(attend(pool, q, rows), expected)


def test_python_threads_when_torch_has_another_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [50 + i for i in range(20)]
    pool = make_pool(torch.bfloat16, lengths)
    q = queries(torch.bfloat16, len(lengths))
    rows = make_rows(pool, range(len(lengths)), lengths)
    expected = attend(pool, q, rows)
    monkeypatch.setattr(runtime, "_launcher", lambda: runtime._on_python_threads)
    with threads(2):
        for _ in range(20):
            assert torch.equal(attend(pool, q, rows), expected)


def test_two_engines_at_once() -> None:
    lengths = [50 + i for i in range(20)]
    pool = make_pool(torch.bfloat16, lengths)
    q = queries(torch.bfloat16, len(lengths))
    rows = make_rows(pool, range(len(lengths)), lengths)
    expected = attend(pool, q, rows)
    right: list[bool] = []

    def engine() -> None:
        right.append(all(torch.equal(attend(pool, q, rows), expected) for _ in range(20)))

    engines = [threading.Thread(target=engine) for _ in range(2)]
    for thread in engines:
        thread.start()
    for thread in engines:
        thread.join()
    assert right == [True, True]


def test_refuses_what_it_cannot_read() -> None:
    pool = make_pool(torch.bfloat16, [20])
    q = queries(torch.bfloat16, 1)
    rows = make_rows(pool, [0], [20])
    with pytest.raises(TypeError, match="float64"):
        attend(pool, q.double(), rows)
    with pytest.raises(TypeError, match="bfloat16"):
        attend(pool, q.float(), rows)
    with pytest.raises(ValueError, match="2 rows"):
        attend(pool, q, make_rows(pool, [0, 0], [20, 20]))
    with pytest.raises(ValueError, match="do not fit"):
        attend(pool, q[:, :8], rows)
    with pytest.raises(ValueError, match="contiguous"):
        attend(pool, q.transpose(1, 2).contiguous().transpose(1, 2), rows)
    with pytest.raises(ValueError, match="even width"):
        attend(make_pool(torch.bfloat16, [20], width=5), q[..., :5].contiguous(), rows)
    with pytest.raises(ValueError, match="need 9 numbers"):
        attend(pool, q, rows, Weighing(sinks=torch.zeros(3)))
    with pytest.raises(ValueError, match="longer than its block table"):
        make_rows(pool, [0], [33])
    with pytest.raises(TypeError, match="int32"):
        dataclasses.replace(rows, sequence=np.zeros(1, np.int64))


def test_tiles_cover_every_row_once() -> None:
    pool = make_pool(torch.bfloat16, [100, 100, 100])
    sequence = [0] * 70 + [1] + [2] * 5 + [0]
    runs = tiles(make_rows(pool, sequence, [9] * len(sequence)))
    assert sorted(row for first, last in runs.tolist() for row in range(first, last)) == list(range(len(sequence)))
    assert all(len({*sequence[first:last]}) == 1 and last - first <= 32 for first, last in runs.tolist())
