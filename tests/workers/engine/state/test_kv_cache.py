from __future__ import annotations

import random

import pytest
import torch

from workers.engine.api.request import Request
from workers.engine.state.kv_cache import CacheShape, KVCache
from workers.engine.state.sequence import Sequence


def make_cache(
    blocks: int = 8, block_size: int = 4, *, prefix_reuse: bool = True, window: int | None = None
) -> KVCache:
    shape = CacheShape.uniform(2, 1, 2, torch.float32, torch.device("cpu"), 8, window)
    return KVCache(shape, blocks, block_size, prefix_reuse=prefix_reuse)


def make_sequence(tokens: list[int], index: int = 0) -> Sequence:
    return Sequence(Request(index, tokens), index, frozenset(), 10_000)


def test_reserve_takes_whole_blocks_or_nothing() -> None:
    cache = make_cache(blocks=3)
    first, second = make_sequence([1] * 5), make_sequence([2] * 5)
    cache.open(first)
    cache.open(second)
    assert cache.reserve(first, 5)
    assert (cache.num_used, cache.num_free) == (2, 1)
    assert not cache.reserve(second, 5)
    assert cache.num_free == 1, "a refused reservation changes nothing"
    assert cache.reserve(first, 8), "the last block has room"
    assert cache.num_used == 2
    cache.free(first)
    assert cache.reserve(second, 5)
    cache.check()


def test_a_common_prefix_is_computed_once() -> None:
    cache = make_cache()
    first, second, other = make_sequence([*range(9)]), make_sequence([*range(8), 77]), make_sequence([5, *range(8)])
    assert cache.open(first) == 0
    cache.reserve(first, 9)
    cache.announce(first, 9)
    cache.commit(first, 9)
    assert cache.open(second) == 8
    assert cache.block_table(second) == cache.block_table(first)[:2]
    assert cache.open(other) == 0
    cache.check()
    cache.free(first)
    cache.check()
    assert cache.num_used == 2, "the second still holds the shared blocks"


def test_blocks_behind_the_window_go_back_to_the_pool() -> None:
    cache = make_cache(window=6)
    first, second = make_sequence([*range(24)]), make_sequence([*range(24)], 1)
    cache.open(first)
    cache.reserve(first, 20)
    for end, used in ((8, 5), (9, 4), (12, 4), (13, 3), (20, 2)):  # the row at 9 sees positions 4 to 9
        cache.announce(first, end)
        cache.commit(first, end)
        cache.check()
        assert cache.num_used == used
    assert cache.block_table(first)[:3] == [0, 0, 0]
    assert cache.open(second) == 20, "what was given back is still found as a prefix"
    assert cache.reserve(first, 24)
    cache.free(first)
    cache.check()
    cache.commit(second, 20)
    cache.free(second)
    cache.check()
    assert cache.num_used == 0


def test_hidden_states_behind_the_window_stay() -> None:
    cache = make_cache(window=6)
    cache.keep_hidden((0,))
    seq = make_sequence([*range(20)])
    cache.open(seq)
    cache.reserve(seq, 20)
    cache.commit(seq, 20)
    assert cache.num_used == 5


def test_the_last_token_is_never_taken_from_a_prefix() -> None:
    cache = make_cache()
    first, same = make_sequence([*range(8)]), make_sequence([*range(8)])
    cache.open(first)
    cache.reserve(first, 8)
    cache.announce(first, 8)
    assert cache.open(same) == 4, "its logits are needed, so its block is computed again"


def test_freed_blocks_serve_as_prefix_until_they_are_reused() -> None:
    cache = make_cache(blocks=3)
    first = make_sequence([*range(9)])
    cache.open(first)
    cache.reserve(first, 9)
    cache.announce(first, 9)
    cache.free(first)
    assert cache.num_free == 3
    again = make_sequence([*range(9)])
    assert cache.open(again) == 8
    cache.free(again)
    greedy = make_sequence([9] * 12)
    cache.open(greedy)
    assert cache.reserve(greedy, 12)
    assert cache.open(make_sequence([*range(9)])) == 0
    cache.check()


def test_an_accepted_path_moves_to_canonical_slots() -> None:
    cache = make_cache()
    seq = make_sequence([1, 2, 3])
    cache.open(seq)
    cache.reserve(seq, 9)
    for position in range(9):
        for pool in (*cache.keys, *cache.values):
            pool[cache.slot(seq, position)] = float(position)
    cache.gather_paths([(seq, 3, [1, 3, 5])])
    for pool in (*cache.keys, *cache.values):
        row = [pool[cache.slot(seq, position), 0, 0].item() for position in range(6)]
        assert row == [0, 1, 2, 4, 6, 8]


@pytest.mark.parametrize("seed", range(5))
def test_free_and_used_are_all_after_anything(seed: int) -> None:
    rng = random.Random(seed)
    cache = make_cache(blocks=12)
    live: list[Sequence] = []
    for index in range(400):
        action = rng.random()
        if action < 0.4 or not live:
            seq = make_sequence([rng.randrange(2) for _ in range(rng.randrange(1, 20))], index)
            start = cache.open(seq)
            assert start <= len(seq) - 1
            if cache.reserve(seq, len(seq)):
                cache.announce(seq, len(seq))
                cache.commit(seq, len(seq))
                live.append(seq)
            else:
                cache.free(seq)
        elif action < 0.7:
            seq = rng.choice(live)
            if cache.reserve(seq, len(seq) + 3):
                seq.tokens.extend([rng.randrange(2)] * rng.randrange(1, 4))
                cache.announce(seq, len(seq) - 1)
                cache.commit(seq, len(seq) - 1)
        else:
            cache.free(live.pop(rng.randrange(len(live))))
        cache.check()
    for seq in live:
        cache.free(seq)
    assert cache.num_used == 0
