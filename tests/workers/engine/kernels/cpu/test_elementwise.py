"""The kernels between matrix products against the torch operations that transformers uses."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

from workers.engine.kernels.cpu.elementwise import Rotation, add_norm, rotate_and_cache, silu_mul

DTYPES = [torch.float32, torch.bfloat16]
WIDTHS = [1, 31, 64, 576, 1000]


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_add_norm(width: int, dtype: torch.dtype) -> None:
    residual, delta = (numbers(70, width, dtype=dtype, seed=seed) for seed in (1, 2))
    weight, out = numbers(width, dtype=dtype, seed=3), torch.empty_like(residual)
    summed = residual + delta
    add_norm(residual, delta, weight, 1e-5, out)
    assert torch.equal(residual, summed)
    # The order of the sum may move a number to its neighbour, no further.
    torch.testing.assert_close(out, rms_norm(summed, weight, 1e-5), atol=1e-6, rtol=torch.finfo(dtype).eps * 2)
    add_norm(residual, None, weight, 1e-5, out)
    assert torch.equal(residual, summed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_silu_mul(width: int, dtype: torch.dtype) -> None:
    gate_up, out = numbers(70, 2 * width, dtype=dtype) * 20, torch.empty(70, width, dtype=dtype)
    silu_mul(gate_up, out)
    expected = silu(gate_up[:, :width]) * gate_up[:, width:]
    torch.testing.assert_close(out, expected, atol=1e-30, rtol=torch.finfo(dtype).eps * 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [False, True])
def test_rotate_and_cache(normed: bool, dtype: torch.dtype) -> None:
    heads, kv_heads, width, rows = 5, 2, 24, 70
    qkv = numbers(rows, (heads + 2 * kv_heads) * width, dtype=dtype)
    cos, sin = (numbers(90, width, dtype=dtype, seed=seed) for seed in (1, 2))
    norms = (numbers(width, dtype=dtype, seed=3), numbers(width, dtype=dtype, seed=4)) if normed else None
    positions, slots = torch.randint(0, 90, (rows,)), torch.randperm(100)[:rows]
    keys, values = (torch.zeros(100, kv_heads, width, dtype=dtype) for _ in range(2))

    q, k, v = qkv.clone().view(rows, -1, width).split([heads, kv_heads, kv_heads], dim=1)
    rotate_and_cache(qkv, positions, slots, Rotation(heads, kv_heads, width, cos, sin), norms, 1e-6, keys, values)

    if norms:
        q, k = rms_norm(q, norms[0], 1e-6), rms_norm(k, norms[1], 1e-6)
    tolerance = (
        {"atol": 0.0, "rtol": 0.0} if not normed else {"atol": 0.06 if dtype is torch.bfloat16 else 1e-5, "rtol": 0}
    )
    q, k = (_rotated(part, cos[positions][:, None], sin[positions][:, None]) for part in (q, k))
    torch.testing.assert_close(qkv.view(rows, -1, width)[:, :heads], q, **tolerance)
    torch.testing.assert_close(keys[slots], k, **tolerance)
    assert torch.equal(values[slots], v)
    untouched = sorted(set(range(100)) - set(slots.tolist()))
    assert not keys[untouched].any()


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_feel_the_others(dtype: torch.dtype) -> None:
    rows, width = 90, 576
    residual, weight = numbers(rows, width, dtype=dtype), numbers(width, dtype=dtype, seed=1)
    together, gated = torch.empty_like(residual), torch.empty(rows, width // 2, dtype=dtype)
    add_norm(residual, None, weight, 1e-5, together)
    silu_mul(residual, gated)
    for row in (0, 7, 89):
        alone, gated_alone = torch.empty(1, width, dtype=dtype), torch.empty(1, width // 2, dtype=dtype)
        add_norm(residual[row : row + 1], None, weight, 1e-5, alone)
        silu_mul(residual[row : row + 1], gated_alone)
        assert torch.equal(alone[0], together[row])
        assert torch.equal(gated_alone[0], gated[row])


@pytest.mark.parametrize("dtype", DTYPES)
def test_not_a_number_stays_one(dtype: torch.dtype) -> None:
    gate_up = torch.tensor([[float("nan"), float("inf"), 1.0, float("nan")]], dtype=dtype)
    out = torch.empty(1, 2, dtype=dtype)
    silu_mul(gate_up, out)
    assert out.isnan().all()
