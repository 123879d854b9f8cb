"""Targets with requests, and drafts for them that are often right: where exactness is put to the test."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.support.drafts.recital import OTHER, TEXT, byte_level, reciting, sentencepiece
from tests.support.drafts.weights import (
    CHAINED3,
    LAYER,
    chained_eagle3,
    chained_heads,
    eagle1_tensors,
    random_heads,
    tiny_model,
    write_eagle,
    write_heads,
)
from tests.support.engine.runs import TARGET, answers, mixed_requests, run
from tests.support.models.tiny import VOCAB, save_tokenizer
from workers.engine import EngineConfig, EngineCore, Request, SamplingParams, SpeculationConfig
from workers.engine.models.executor import LoadedModel
from workers.engine.models.loading.load import load_model
from workers.engine.speculators.draft_model.reading import choose_reading
from workers.engine.speculators.draft_model.speculator import DraftModelSpeculator
from workers.engine.speculators.medusa.tree import calibrate_tree, write_tree
from workers.engine.speculators.speculator import Speculator, SpeculatorContext
from workers.engine.state.kv_cache import KVCache

Answers = dict[object, tuple[object, ...]]


@dataclass
class World:
    """`drafts`: what options call a draft -> its name for the engine, or the model itself."""

    target: LoadedModel
    requests: list[Request]
    drafts: Mapping[str, str | LoadedModel]

    @cached_property
    def truth(self) -> Answers:
        """Plain decoding, one request at a time."""
        return answers(run(self.core(SpeculationConfig(), max_batch=1, prefix_reuse=False), self.requests))

    def core(self, speculation: SpeculationConfig, **options: Any) -> EngineCore:
        draft = self.drafts.get(speculation.draft or "")
        if isinstance(draft, str):
            speculation = replace(speculation, draft=draft)
        given = {"target": self.target.name, "kv_blocks": 1200, "speculation": speculation, **options}
        config = EngineConfig(**given)
        if not isinstance(draft, LoadedModel):
            return EngineCore(config, model=self.target)

        def make(context: SpeculatorContext) -> dict[str, Speculator]:
            cache = KVCache(draft.facts.cache_shape, context.cache.num_blocks, config.block_size)
            reading = choose_reading(config, context.target, draft)
            made = DraftModelSpeculator(draft.executor, cache, reading, max_step_tokens=config.max_step_tokens)
            return {"draft_model": made}

        return EngineCore(config, model=self.target, make=make)


def scripted(folder: Path) -> World:
    """A hash for a model. Its drafts have the same favourites, but not the same confidence, and end nowhere."""
    draft = "scripted:seed=3,order=2,eos_every=0,sharpness=1.6"
    drafts = {"small": draft, "other ids": f"{draft},vocab=300"}
    return World(load_model(EngineConfig(TARGET)), mixed_requests(120), drafts)


def repeating(folder: Path) -> World:
    """The next token depends on the last one alone, and with this seed most answers soon go round in circles."""
    return World(load_model(EngineConfig("scripted:seed=40,order=1,eos_every=0,sharpness=6")), mixed_requests(120), {})


def tiny(folder: Path) -> World:
    """A Llama of three layers whose next token depends mostly on the last one."""
    model = tiny_model()
    model.save_pretrained(folder / "tiny")
    save_tokenizer(folder / "tiny")
    heads = chained_heads(model)
    answer = [(0, 0, 0), (0, 1), (0, 0, 2), (1, 0), (3,), (), (0, 0, 0, 0)]
    drafts = {
        "heads": write_heads(folder / "heads", heads),
        "calibrated heads": write_heads(folder / "calibrated", heads),
        "random heads": write_heads(folder / "random", random_heads(2, 2), 2),
        "eagle1": write_eagle(folder / "eagle1", LAYER, eagle1_tensors(near=0.02)),
        "eagle3": write_eagle(
            folder / "eagle3", {**CHAINED3, "draft_vocab_size": VOCAB}, chained_eagle3(model, draft_vocab=VOCAB)
        ),
        "eagle3, fewer tokens": write_eagle(
            folder / "fewer", {**CHAINED3, "draft_vocab_size": 200}, chained_eagle3(model, draft_vocab=200)
        ),
    }
    write_tree(folder / "calibrated", calibrate_tree([answer * 3], 9))
    return World(load_model(EngineConfig(str(folder / "tiny"))), mixed_requests(120, max_tokens=24), drafts)


def recital(folder: Path) -> World:
    """Models that know a text by heart, in tokens of their own. Openings of the text come first."""
    target = reciting(byte_level(TEXT, 420), padding=5, name="target")
    drafts = {
        "bpe": reciting(byte_level(TEXT + OTHER * 4, 340), padding=3, seed=1, name="bpe"),
        "sentencepiece": reciting(sentencepiece(TEXT, 450), seed=2, name="sentencepiece"),
    }
    params = [SamplingParams(max_tokens=30, temperature=temperature, seed=7) for temperature in (0.0, 0.8)]
    prompts = [target.tokenizer.encode(TEXT[start : start + 20]) for start in range(0, 160, 40)]
    openings = [
        Request((start, one.temperature), prompt, one) for start, prompt in enumerate(prompts) for one in params
    ]
    return World(target, [*openings, *mixed_requests(12, max_tokens=20)], drafts)


WORLDS = {"scripted": scripted, "repeating": repeating, "tiny": tiny, "recital": recital}
