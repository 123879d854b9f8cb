"""Drafts in another vocabulary: the mapping, the cache of what the draft reads, and that they are of use."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.drafts.caches import Prefill, watch
from tests.support.drafts.recital import OTHER, TEXT, byte_level, reciting, sentencepiece
from tests.support.drafts.weights import tiny_target
from tests.support.engine.runs import mixed_requests, run
from tests.support.models.tiny import VOCAB, build, config_of
from workers.engine import EngineConfig, EngineCore, Request, SamplingParams, SpeculationConfig
from workers.engine.api.errors import InvalidConfig
from workers.engine.api.tree_shape import TreeShape
from workers.engine.models.executor import LoadedModel
from workers.engine.models.loading.pretrained import build_executor
from workers.engine.speculators.draft_model.reading import (
    MappedReading,
    Reading,
    SameReading,
    TextReading,
    choose_reading,
)
from workers.engine.speculators.draft_model.speculator import DraftModelSpeculator
from workers.engine.speculators.draft_model.vocabulary import Spelling, VocabularyMap
from workers.engine.speculators.shared.drawing import DraftNoise
from workers.engine.speculators.speculator import Speculator, SpeculatorContext
from workers.engine.state.kv_cache import KVCache
from workers.engine.state.sequence import Sequence

TARGET = reciting(byte_level(TEXT, 420), padding=5, name="target")
DRAFTS = {
    "bpe": reciting(byte_level(TEXT + OTHER * 4, 340), padding=3, seed=1, name="bpe"),
    "sentencepiece": reciting(sentencepiece(TEXT, 450), seed=2, name="sentencepiece"),
}


def speculation(**options: Any) -> SpeculationConfig:
    return SpeculationConfig(**{"method": "draft_model", "draft": "draft", "policy": "fixed", **options})


def engine(speculation: SpeculationConfig, draft: LoadedModel | None = None, **options: Any) -> EngineCore:
    config = EngineConfig(**{"target": "target", "speculation": speculation, "max_model_len": 256, **options})

    def make(context: SpeculatorContext) -> dict[str, Speculator]:
        assert draft is not None
        cache = KVCache(draft.facts.cache_shape, context.cache.num_blocks, config.block_size)
        reading = choose_reading(config, context.target, draft)
        made = DraftModelSpeculator(draft.executor, cache, reading, max_step_tokens=config.max_step_tokens)
        return {"draft_model": made}

    return EngineCore(config, model=TARGET, make=make) if draft else EngineCore(config, model=TARGET)


def requests() -> list[Request]:
    """Random bytes with every sampling feature, and openings from the text."""
    openings = [TEXT[start : start + 20] for start in range(0, 160, 40)]
    params = [SamplingParams(max_tokens=40, temperature=t, seed=7) for t in (0.0, 0.8)]
    prompts = [(TARGET.tokenizer.encode(opening), one) for opening in openings for one in params]
    return [
        *mixed_requests(12, max_tokens=20),
        *(Request(100 + index, prompt, one) for index, (prompt, one) in enumerate(prompts)),
    ]


USEFUL = {"bpe": 0.3, "sentencepiece": 0.6}
"""Accepted share of first drafted tokens. The two cut words alike, the first one knows longer words."""


@pytest.mark.parametrize(
    "options", [{"vocabulary": "mapped"}, {"vocabulary": "text"}, {"policy": "threshold"}], ids=str
)
@pytest.mark.parametrize("draft", DRAFTS)
def test_drafts_are_of_use(draft: str, options: dict[str, Any]) -> None:
    """On openings of a text that both know."""
    done = run(engine(speculation(**options), DRAFTS[draft], max_batch=4, max_step_tokens=16), requests())
    stats = [done[100 + index].stats for index in range(8)]
    reached = sum(sum(s.reached_per_depth[:1]) for s in stats)
    assert reached > 40
    assert sum(sum(s.accepted_per_depth[:1]) for s in stats) > USEFUL[draft] * reached


@pytest.mark.parametrize("verify", ["rejection", "block"])
def test_other_rules_take_the_renormalised_distribution(verify: str) -> None:
    """Drawn apart over the common tokens: counts add up, nothing outside the vocabulary comes out."""
    done = run(engine(speculation(vocabulary="mapped", verify=verify), DRAFTS["bpe"]), requests())
    for completion in done.values():
        assert completion.stats.emitted == len(completion.token_ids)
    assert sum(completion.stats.accepted for completion in done.values()) > 40


def test_pieces_are_bytes_however_they_are_written() -> None:
    sides = [TARGET.tokenizer, DRAFTS["sentencepiece"].tokenizer]
    for tokenizer in sides:
        for text in (TEXT, "naïve Überall", "zebra 9"):
            ids = tokenizer.encode_batch([text], special_tokens=False)[0]
            said = Spelling(tokenizer.pieces()).say(ids)
            assert said.removeprefix(b" ") == text.encode()
    eos = min(TARGET.tokenizer.eos_token_ids)
    assert TARGET.tokenizer.pieces()[eos] == "<eos>"


def test_the_mapping() -> None:
    vocabulary = VocabularyMap(TARGET, DRAFTS["sentencepiece"])
    target, draft = vocabulary.target, vocabulary.draft
    logits = torch.randn(3, DRAFTS["sentencepiece"].facts.vocab_size)
    mapped = vocabulary.to_target(logits)
    assert mapped.shape == (3, TARGET.facts.vocab_size)
    found = 0
    for token in range(TARGET.facts.vocab_size):
        piece = target.pieces[token] if token < len(target.pieces) else None
        said = vocabulary.to_draft(token)
        assert said, "every token can be said"
        if mapped[0, token] > -torch.inf:
            found += 1
            assert draft.pieces[said[0]] == piece
            assert mapped[0, token] == logits[0, said[0]]
        elif isinstance(piece, bytes):
            assert draft.say(said) == piece, "in several tokens"
    assert found == vocabulary.num_common
    assert vocabulary.to_draft(min(TARGET.tokenizer.eos_token_ids)) == (1,), "the end of a text is the end of a text"
    assert mapped[0, len(target.pieces) :].max() == -torch.inf, "padding is never common"


@pytest.mark.parametrize("kind", ["mapped", "text"])
def test_what_the_draft_cached_equals_a_fresh_pass(kind: str) -> None:
    """With several draft tokens for one of the target's, after any accepting, rejecting and preempting."""
    whole = tiny_target()
    target = LoadedModel(whole.executor, byte_level(TEXT, 320), "tiny", "0")
    executor = build_executor(build(config_of("Llama", vocab_size=360), seed=2), "numba", "draft", 256)
    draft = LoadedModel(executor, sentencepiece(TEXT, 350), "draft", "1")
    vocabulary = VocabularyMap(target, draft)
    fresh = Prefill(executor)
    checked = 0

    def inner(context: SpeculatorContext) -> DraftModelSpeculator:
        reading: Reading = TextReading(vocabulary, draft, target.tokenizer)
        if kind == "mapped":
            reading = MappedReading(vocabulary, draft, TreeShape(3), VOCAB, DraftNoise.COUPLED)
        return DraftModelSpeculator(executor, KVCache(executor.facts.cache_shape, 90, 4), reading, max_step_tokens=40)

    def check(speculator: DraftModelSpeculator, seq: Sequence, features: torch.Tensor) -> None:
        nonlocal checked
        speculator.cache.check()
        read = speculator.reading.of(seq)
        assert list(read.tokens) == [said for token in seq.tokens for said in vocabulary.to_draft(token)]
        if speculator.cache.holds(read):
            fresh.compare(speculator.cache, read, speculator.cache.num_cached(read))
            checked += 1

    watch(whole, inner, check, depths=1)
    assert checked >= 150


def test_the_choice() -> None:
    def choose(draft: LoadedModel, target: LoadedModel = TARGET, **options: Any) -> object:
        return type(choose_reading(EngineConfig("target", speculation=speculation(**options)), target, draft))

    assert choose(TARGET) is SameReading
    assert choose(DRAFTS["bpe"]) is MappedReading
    assert choose(DRAFTS["sentencepiece"], vocabulary="text") is TextReading
    padded = reciting(byte_level(TEXT, 420), padding=64, name="target")
    assert choose(padded) is MappedReading, "the same tokens with other padding"
    assert choose(padded, vocabulary="same") is MappedReading
    with pytest.raises(InvalidConfig, match=r"different vocabularies: \d+ tokens in common \(\d+% of the smaller\)"):
        choose(DRAFTS["bpe"], vocabulary="same")
    with pytest.raises(InvalidConfig, match="drafts through text are chains"):
        choose(DRAFTS["bpe"], vocabulary="text", tree_width=2)
    empty = LoadedModel(TARGET.executor, _Silent(TARGET.tokenizer), "silent", "2")  # type: ignore[arg-type]
    with pytest.raises(InvalidConfig, match=r"0 tokens in common .* too few to draft from"):
        choose(empty, vocabulary="mapped")
    with pytest.raises(InvalidConfig, match="no tokens that stand for text"):
        choose(empty)


class _Silent:
    """A tokenizer without text."""

    def __init__(self, other: Any) -> None:
        self.eos_token_ids = other.eos_token_ids

    def pieces(self) -> list[str]:
        return ["<a>", "<b>"]
