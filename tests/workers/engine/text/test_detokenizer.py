from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.drafts.recital import TEXT, byte_level, sentencepiece
from tests.support.engine.runs import answers, engine, oracle, run
from workers.engine import EngineCore, Request, SamplingParams, SpeculationConfig
from workers.engine.api.request import Tokenizer
from workers.engine.api.tokenizer import TextTokenizer
from workers.engine.models.loading.load import load_model
from workers.engine.text.detokenizer import StopMatch, StopScanner
from workers.engine.text.tokenizer import ByteTokenizer

LETTERS = "ab é日🙂"
ENDLESS = "scripted:seed=3,order=2,eos_every=0"


def first_stop(
    tokenizer: Tokenizer, tokens: Sequence[int], stops: Sequence[str], min_tokens: int
) -> tuple[int, str, int] | None:
    """Reference: everything decoded again at every token, the new letters looked at one by one.

    Tokens until the stop, the text before it, and which of `stops` it was.
    """
    text = ""
    for count in range(1, len(tokens) + 1):
        finished = tokenizer.decode(tokens[:count]).rstrip("\ufffd")
        known, text = len(text), text + finished[len(text) :]
        for end in range(known + 1, len(text) + 1):
            met = [stop for stop in stops if text[:end].endswith(stop)]
            if met and count >= min_tokens:
                stop = max(met, key=len)
                return count, text[: end - len(stop)], stops.index(stop)
    return None


def found(tokenizer: Tokenizer, tokens: Sequence[int], stops: Sequence[str], min_tokens: int) -> object:
    """The same with the scanner."""
    scanner = StopScanner(tokenizer, tuple(stops))
    for count, token in enumerate(tokens, 1):
        match = scanner.push(token)
        if match is not None and count >= min_tokens:
            return count, scanner.text[: match.start], stops.index(match.stop)
    return None


@cache
def tokenizer_of(kind: str) -> TextTokenizer:
    make = {"bytes": lambda *_: ByteTokenizer(), "byte level": byte_level, "sentencepiece": sentencepiece}[kind]
    return make(f"{TEXT} aéb日本 🙂a🙂é " * 4, 420)  # type: ignore[no-any-return]


def test_the_vocabularies_hold_tokens_that_begin_a_character_or_end_one() -> None:
    mixed = [p for p in tokenizer_of("byte level").pieces() if isinstance(p, bytes) and len(p) > 1]
    assert any(piece[0] < 128 <= piece[-1] for piece in mixed)


@given(
    st.sampled_from(["bytes", "byte level"]),
    st.lists(st.integers(0, 419) | st.sampled_from(LETTERS + "🙂aé日 "), max_size=40),
    st.lists(st.text(LETTERS + "\ufffd", min_size=1, max_size=4), min_size=1, max_size=4, unique=True),
    st.integers(0, 20),
)
@settings(max_examples=200, deadline=None)
def test_a_stop_is_found_where_the_reference_finds_it(
    kind: str, items: list[int | str], stops: list[str], min_tokens: int
) -> None:
    """Tokens at random among texts: lone bytes, halves of characters, and stops that lie across all of them."""
    tokenizer = tokenizer_of(kind)
    tokens = [t for item in items for t in (tokenizer.encode(item) if isinstance(item, str) else [item])]
    assert found(tokenizer, tokens, stops, min_tokens) == first_stop(tokenizer, tokens, stops, min_tokens)


@given(
    st.text(LETTERS + "o m", max_size=30), st.lists(st.text(LETTERS, min_size=1, max_size=4), min_size=1, unique=True)
)
@settings(max_examples=100, deadline=None)
def test_characters_in_runs_of_bytes_are_found_as_well(text: str, stops: list[str]) -> None:
    tokenizer = tokenizer_of("sentencepiece")
    tokens = tokenizer.encode(text)
    assert found(tokenizer, tokens, stops, 3) == first_stop(tokenizer, tokens, stops, 3)


@pytest.mark.parametrize(
    ("stops", "pieces", "passed_over", "expected"),
    [
        (("GQ",), ["G", "Q", "GQx", "x"], 2, ("GQ", 2)),
        (("GQ", "far too long for this"), ["G", "Q", "x", "y"], 2, None),
        (("xGQy",), ["x", "G", "Q", "y"], 3, ("xGQy", 0)),
        (("ab",), ["a", b"b\xe6", b"\x97\xa5"], 0, ("ab", 0)),
        (("b", "abc"), ["abc"], 0, ("b", 1)),
        (("bc", "abc"), ["abc"], 0, ("abc", 0)),
    ],
    ids=["passed over", "other stop", "across", "begins a character", "first to end", "longest"],
)
def test_which_match_counts(
    stops: tuple[str, ...], pieces: list[str | bytes], passed_over: int, expected: tuple[str, int] | None
) -> None:
    class Pieces:
        vocab_size, eos_token_ids = len(pieces), frozenset[int]()

        def decode(self, token_ids: Sequence[int]) -> str:
            parts = (pieces[token] for token in token_ids)
            return b"".join(p if isinstance(p, bytes) else p.encode() for p in parts).decode(errors="replace")

    scanner = StopScanner(Pieces(), stops)
    matches = [scanner.push(token) for token in range(len(pieces))]
    found = next(filter(None, matches[passed_over:]), None)
    assert found == (None if expected is None else StopMatch(*expected))


@pytest.mark.parametrize(
    "text", [b"\xe6" * 4000, b"\x80" * 4000, b"a" + b"\xe6\x97" * 2000], ids=["lead", "rest", "cut"]
)
def test_the_scan_is_linear_where_no_character_gets_finished(text: bytes) -> None:
    class Counting(ByteTokenizer):
        decoded = 0

        def decode(self, token_ids: Sequence[int]) -> str:
            self.decoded += len(token_ids)
            return super().decode(token_ids)

    tokenizer = Counting()
    scanner = StopScanner(tokenizer, ("END",))
    assert [scanner.push(token) for token in text + b"END"].count(None) == len(text) + 2
    assert scanner.text == (text + b"END").decode(errors="replace")
    assert tokenizer.decoded < 50 * len(text)


@pytest.mark.parametrize("length", [1, 3, 8])
def test_stops_end_requests_alike_at_every_draft_length(length: int) -> None:
    """Stops taken from what the model says without them, under min_tokens that pass some of them over."""
    rng = random.Random(length)
    free = [
        Request(i, [rng.randrange(32, 127) for _ in range(5)], SamplingParams(max_tokens=60, temperature=t))
        for i, t in enumerate([0.0, 1.0] * 20)
    ]
    truth = run(engine(ENDLESS), free)
    requests, expected = [], {}
    for request in free:
        text, tokens = truth[request.id].text, truth[request.id].token_ids
        at = [rng.randrange(len(text) - 3) for _ in range(3)]
        stops = tuple(dict.fromkeys([*(text[i : i + rng.randrange(1, 4)] for i in at), "not in any answer"]))
        params = replace(request.params, stop=stops, min_tokens=rng.choice((0, 10, 30)))
        requests.append(replace(request, params=params))
        stopped = first_stop(ByteTokenizer(), tokens, stops, params.min_tokens)
        end, cut, which = stopped or (len(tokens), text, None)
        expected[request.id] = (tokens[:end], cut, None if which is None else stops[which])
    speculation = SpeculationConfig(method="ngram", policy="fixed", max_draft_tokens=length)
    plain = engine(ENDLESS)
    core = EngineCore(
        replace(plain.config, speculation=speculation),
        model=load_model(plain.config),
        make=lambda context: {"ngram": oracle(truth, accuracy=0.7)},
    )
    done = run(core, requests)
    assert {key: (c.token_ids, c.text, c.stop_reason) for key, c in done.items()} == expected
    assert answers(done) == answers(run(plain, requests))
    assert sum(c.stats.accepted for c in done.values()) > 100
    assert sum(c.stop_reason is not None for c in done.values()) > 20


def test_the_stop_that_ended_a_request_is_named() -> None:
    free = Request("free", b"go", SamplingParams(max_tokens=30))
    tokens = run(engine(ENDLESS), [free])["free"].token_ids
    by_id = replace(free, id="id", params=replace(free.params, stop_token_ids=(tokens[7],)))
    neither = replace(free, id="neither", params=replace(free.params, stop=("never said",)))
    done = run(engine(ENDLESS), [free, by_id, neither])
    assert {key: c.stop_reason for key, c in done.items()} == {"free": None, "id": tokens[7], "neither": None}
