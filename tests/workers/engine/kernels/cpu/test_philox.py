"""Philox against Random123's known answers and a slow reference of its own."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from workers.engine.kernels.cpu.philox import ACCEPT, DRAFT, TARGET, gumbel_rows, philox, uniform_at

SEEDS = [0, 1, 2**32 - 1, 2**32, 2**63 + 12345, 2**64 - 1]
POSITIONS = [0, 7, 2**31, 2**32 + 5, 2**40, 2**55]


def reference_philox(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        left, right = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (right >> 32) ^ c1 ^ k0, right & 0xFFFFFFFF, (left >> 32) ^ c3 ^ k1, left & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def reference_words(seed: int, position: int, index: int, stream: int, step: int = 0) -> tuple[int, ...]:
    high = (position >> 32) & 0xFFFFFF | stream << 24
    return reference_philox((index, position & 0xFFFFFFFF, high, step), (seed & 0xFFFFFFFF, seed >> 32))


def reference_gumbel(seed: int, position: int, token: int, stream: int = TARGET) -> float:
    word = reference_words(seed, position, token // 4, stream)[token % 4]
    v = float(np.float32(np.float32(word) + np.float32(0.5))) / 2**32
    return -math.log(-math.log1p(-min(v, 1 - 2**-24)))


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]) -> None:
    assert reference_philox(counter, key) == words
    c0, c1, c2, c3 = map(np.uint32, counter)
    compiled = philox(c0, c1, c2, c3, np.uint64(key[1] << 32 | key[0]))
    assert tuple(map(int, compiled)) == words


@pytest.mark.parametrize("stream", [TARGET, DRAFT, 255])
def test_gumbel_agrees_with_the_reference(stream: int) -> None:
    noise = gumbel_rows(SEEDS, POSITIONS, 137, stream)
    expected = [[reference_gumbel(s, p, t, stream) for t in range(137)] for s, p in zip(SEEDS, POSITIONS, strict=True)]
    torch.testing.assert_close(noise.double(), torch.tensor(expected, dtype=torch.float64), rtol=2e-7, atol=2e-7)


def test_a_token_does_not_know_its_neighbours() -> None:
    """Same bits whatever the vocabulary, the rows beside it, their order, and the threads."""
    vocab = 3 * 4096 + 7
    full = gumbel_rows(SEEDS, POSITIONS, vocab)
    for size in (1, 2, 3, 4, 5, 63, 4095, 4096, 4097):
        assert torch.equal(gumbel_rows(SEEDS, POSITIONS, size), full[:, :size])
    order = [3, 0, 5, 1]
    part = gumbel_rows([SEEDS[i] for i in order], [POSITIONS[i] for i in order], vocab)
    assert torch.equal(part, full[order])
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(gumbel_rows(SEEDS, POSITIONS, vocab), full)
    finally:
        torch.set_num_threads(before)


def test_noise_is_gumbel() -> None:
    noise = gumbel_rows(range(40), [3] * 40, 49152).double()
    assert noise.mean().item() == pytest.approx(0.5772157, abs=0.004)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.01)
    assert noise.isfinite().all()
    for x in (-1.0, 0.0, 1.0, 3.0, 8.0):
        expected = math.exp(-math.exp(-x))
        error = math.sqrt(expected * (1 - expected) / noise.numel())
        assert (noise <= x).double().mean().item() == pytest.approx(expected, abs=5 * error)


def test_streams_steps_and_seeds_differ() -> None:
    tokens = np.arange(64)[None]
    keys = [(1, 1, 0), (2, 1, 0), (1 + 2**32, 1, 0), (1, 2, 0), (1, 1 + 2**32, 0), (1, 1, 1), (1, 1 + 2**32, 1)]
    draws = [gumbel_rows([seed], [position], 64, stream) for seed, position, stream in keys]
    uniforms = [uniform_at([1], [1], tokens, ACCEPT, step) for step in range(3)]
    for group in (draws, uniforms):
        assert len({tuple(draw[0].tolist()) for draw in group}) == len(group)


def test_uniforms() -> None:
    indices = np.arange(20).reshape(2, 10)
    drawn = uniform_at([5, 2**64 - 1], [9, 2**40], indices, ACCEPT, step=3)
    assert drawn.dtype == torch.float64
    for row, (seed, position) in enumerate([(5, 9), (2**64 - 1, 2**40)]):
        for column in range(10):
            a, b, *_ = reference_words(seed, position, int(indices[row, column]), ACCEPT, 3)
            assert drawn[row, column].item() == (a << 21 | b >> 11) / 2**53
    many = uniform_at([0], [0], np.arange(100_000)[None])
    assert 0 <= many.min() < 1e-4
    assert 1 - 1e-4 < many.max() < 1
    assert many.mean().item() == pytest.approx(0.5, abs=0.005)


def test_out_is_filled_and_checked() -> None:
    out = torch.empty(2, 10)
    assert gumbel_rows([1, 2], [3, 4], 10, out=out) is out
    assert torch.equal(out, gumbel_rows([1, 2], [3, 4], 10))
    for wrong in (torch.empty(2, 11), torch.empty(2, 10, dtype=torch.float64), torch.empty(10, 2).T):
        with pytest.raises(ValueError, match="out must be"):
            gumbel_rows([1, 2], [3, 4], 10, out=wrong)
    with pytest.raises(ValueError, match="one seed and one position"):
        gumbel_rows([1, 2], [3], 10)
    assert gumbel_rows([], [], 10).shape == (0, 10)
