from __future__ import annotations

import random
import tracemalloc
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.support.engine.runs import TARGET, engine, run
from workers.engine import Request, SamplingParams, SpeculationConfig
from workers.engine.kernels.cpu.suffixes import MATCHES
from workers.engine.speculators.lookup.suffix_index import Continuation, GrowingText, SuffixIndex, TextMemory


def follow(
    index: SuffixIndex, context: list[int], length: int = 10, factor: float = 99.0, least: float = 0.0
) -> Continuation:
    return index.continuation(context, length, factor=factor, min_probability=least)


def memory(*texts: list[int], depth: int = 64, max_tokens: int = 10_000) -> TextMemory:
    index = TextMemory(depth, max_tokens)
    for text in texts:
        index.add(text)
    return index


def search(texts: list[list[int]], context: list[int], depth: int, length: int = 6) -> tuple[Continuation, int]:
    """By looking everywhere: what follows the longest suffix, and at how many places it is."""
    longest, places = 1, []
    for text in texts:
        for end in range(2, len(text)):
            size = 0
            while size < min(end, len(context), depth) and text[end - 1 - size] == context[-1 - size]:
                size += 1
            if size > longest:
                longest, places = size, []
            if size == longest > 1:
                places.insert(0, text[end : end + length])
    total, tokens, shares = len(places), [], []
    while places := [place for place in places if len(place) > len(tokens)]:
        token, count = Counter(place[len(tokens)] for place in places).most_common(1)[0]
        places = [place for place in places if place[len(tokens)] == token]
        tokens.append(token)
        shares.append(count / total)
    return Continuation(tuple(tokens), tuple(shares), longest if total else 0), total


def contexts_like(texts: list[list[int]], rng: random.Random, vocab: int) -> Iterator[list[int]]:
    """Some that are made up, and some that texts go on from."""
    for _ in range(20):
        yield [rng.randrange(vocab) for _ in range(rng.randrange(10))]
        text = rng.choice(texts)
        yield [rng.randrange(vocab), *text[: rng.randrange(len(text) + 1)]]


def test_the_longest_match_wins_over_more_frequent_shorter_ones() -> None:
    index = memory(*[[2, 3, 9, 9]] * 5, [1, 2, 3, 7, 8])
    found = follow(index, [0, 1, 2, 3])
    assert (found.tokens, found.match_length) == ((7, 8), 3)


@pytest.mark.parametrize("shared", [2, 10, 19])
def test_a_long_match_is_found_behind_any_number_of_later_shorter_ones(shared: int) -> None:
    known = list(range(100, 120))
    later = [[*range(1000 + 50 * text, 1020 + 50 * text), *known[-shared:], 9, 9] for text in range(500)]
    index = memory([*known, 7, 8], *later, max_tokens=100_000)
    found = follow(index, known)
    assert (found.tokens, found.probabilities, found.match_length) == ((7, 8), (1.0, 1.0), 20)


def test_the_majority_is_followed_and_its_share_reported() -> None:
    index = memory([1, 2, 4, 5], [1, 2, 4, 6], [1, 2, 7, 7], [1, 2, 4, 5])
    found = follow(index, [1, 2])
    assert found.tokens == (4, 5)
    assert found.probabilities == (0.75, 0.5)
    assert follow(index, [1, 2], least=0.6).tokens == (4,)


def test_of_equally_frequent_continuations_the_latest_is_followed() -> None:
    index = TextMemory(64, 100)
    for text in range(100):
        index.add([1, 2, text])
        assert follow(index, [1, 2]).tokens == (text,)


def test_of_more_places_than_are_looked_at_a_fair_sample_counts() -> None:
    index = memory(*([1, 2, 3 if text < 70 * MATCHES else 4, text] for text in range(100 * MATCHES)), max_tokens=10**6)
    found = follow(index, [1, 2])
    assert found.tokens[0] == 3
    assert 0.5 < found.probabilities[0] < 0.9


def test_the_length_grows_with_the_match() -> None:
    index = memory(list(range(50)))
    assert len(follow(index, [9, 10, 11], length=40, factor=2.0).tokens) == 6
    assert len(follow(index, [*range(12)], length=40, factor=2.0).tokens) == 24
    assert follow(index, [77, 78]).tokens == ()


@pytest.mark.parametrize("vocab", [1, 2, 3, 8])
@pytest.mark.parametrize("depth", [2, 5, 64])
def test_finished_texts_against_a_search_everywhere_while_old_ones_are_forgotten(vocab: int, depth: int) -> None:
    rng = random.Random(100 * vocab + depth)
    index, kept = TextMemory(depth, 120), []
    for _ in range(80):
        text = [rng.randrange(vocab) for _ in range(rng.randrange(3, 40))]
        index.add(text)
        kept.append(text)
        while sum(len(text) + 1 for text in kept) > 120:
            kept.pop(0)
        assert index.num_tokens == sum(len(text) + 1 for text in kept)
        for context in contexts_like(kept, rng, vocab):
            expected, places = search(kept, context, depth)
            found = follow(index, context, length=6)
            assert found == expected if places <= MATCHES else found.match_length == expected.match_length


@pytest.mark.parametrize("vocab", [1, 2, 3, 8])
def test_a_growing_text_against_a_search_everywhere(vocab: int) -> None:
    rng = random.Random(vocab)
    text = [rng.randrange(vocab) for _ in range(300)]
    index = GrowingText(64)
    while (known := index.num_tokens) < len(text):
        index.extend(text[known : known + rng.randrange(1, 9)])
        now = text[: index.num_tokens]
        expected, places = search([now], now, 64)
        found = follow(index, now, length=6)
        assert found == expected if places <= MATCHES else found.match_length == expected.match_length


def test_memory_is_bounded_in_tokens_and_bytes_and_holds_nothing_beside() -> None:
    index, rng = TextMemory(64, 5_000), random.Random(0)
    for text in range(4_000):
        if text == 1_000:
            tracemalloc.start()
        index.add([rng.randrange(50_000) for _ in range(rng.randrange(3, 60))])
        assert index.num_tokens <= 5_000
    more, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert index.num_tokens > 4_900
    assert index.nbytes <= 12 * 5_010
    assert more < 5_000


def test_a_text_that_cannot_be_kept_displaces_nothing() -> None:
    index = memory([1, 2, 3, 4], max_tokens=8)
    for text in ([], [5], [5, 6], [1, 2, *range(10, 20)]):
        index.add(text)
    assert follow(index, [1, 2]).tokens == (3, 4)
    assert index.num_tokens == 5


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


def test_of_many_jobs_the_one_that_finished_nothing_for_longest_is_forgotten() -> None:
    speculation = SpeculationConfig(method="suffix", max_draft_tokens=8, policy="fixed")
    core = engine(TARGET.replace("order=2", "order=0"), speculation=speculation)
    for scope in "abcade":
        run(core, [_repeat(scope, 0)])
    accepted = {scope: run(core, [_repeat(scope, 1)])[scope, 1].stats.accepted for scope in "ab"}
    assert accepted["a"] > 25
    assert accepted["b"] < 5
