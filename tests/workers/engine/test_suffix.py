from __future__ import annotations

import random

from tests.workers.engine.helpers import TARGET, engine, run
from workers.engine import Request, SamplingParams, SpeculationConfig
from workers.engine.speculators.suffix_index import SuffixIndex


def follow(index: SuffixIndex, context: list[int], length: int = 10, factor: float = 9.0, least: float = 0.0):  # type: ignore[no-untyped-def]
    return index.continuation(context, length, factor=factor, min_probability=least)


def test_the_longest_match_wins_over_more_frequent_shorter_ones() -> None:
    index = SuffixIndex(64)
    for _ in range(5):
        index.add([2, 3, 9, 9])
    index.add([1, 2, 3, 7, 8])
    found = follow(index, [0, 1, 2, 3])
    assert (found.tokens, found.match_length) == ((7, 8), 3)


def test_the_majority_is_followed_and_its_share_reported() -> None:
    index = SuffixIndex(64)
    for tail in ([4, 5], [4, 6], [7, 7], [4, 5]):
        index.add([1, 2, *tail])
    found = follow(index, [1, 2])
    assert found.tokens == (4, 5)
    assert found.probabilities == (0.75, 0.5)
    assert follow(index, [1, 2], least=0.6).tokens == (4,)


def test_the_length_grows_with_the_match() -> None:
    index = SuffixIndex(64)
    index.add(list(range(50)))
    assert len(follow(index, [9, 10, 11], length=40, factor=2.0).tokens) == 6
    assert len(follow(index, [*range(12)], length=40, factor=2.0).tokens) == 24
    assert follow(index, [77, 78]).tokens == ()


def test_memory_is_bounded_and_the_oldest_goes_first() -> None:
    index = SuffixIndex(64, max_tokens=100)
    for text in range(50):
        index.add([text * 10 + offset for offset in range(10)])
    assert index.num_tokens == 100
    assert follow(index, [0, 1]).tokens == ()
    assert follow(index, [490, 491]).tokens == (492, 493, 494, 495, 496, 497, 498, 499)
    assert len(index._places) <= 100


def test_against_a_brute_force_search() -> None:
    rng = random.Random(0)
    texts = [[rng.randrange(4) for _ in range(rng.randrange(3, 12))] for _ in range(3)]
    index = SuffixIndex(64)
    for text in texts:
        index.add(text)
    for _ in range(300):
        context = [rng.randrange(4) for _ in range(rng.randrange(2, 8))]
        longest = 0
        for text in texts:
            for end in range(2, len(text)):
                size = 0
                while size < min(end, len(context)) and text[end - 1 - size] == context[-1 - size]:
                    size += 1
                longest = max(longest, size if size >= 2 else 0)
        assert follow(index, context).match_length == longest


def _repeat(scope: str, index: int) -> Request:
    return Request((scope, index), b"same prompt", SamplingParams(max_tokens=40, ignore_eos=True), scope=scope)


def test_finished_outputs_help_their_own_job_and_no_other() -> None:
    speculation = SpeculationConfig(method="suffix", max_draft_tokens=8, policy="fixed")
    core = engine(TARGET.replace("order=2", "order=0"), speculation=speculation)
    first = run(core, [_repeat("a", 0)])["a", 0]
    again = run(core, [_repeat("a", 1)])["a", 1]
    other = run(core, [_repeat("b", 0)])["b", 0]
    assert first.token_ids == again.token_ids == other.token_ids
    assert again.stats.accepted > 25
    assert first.stats.accepted == other.stats.accepted < 5
