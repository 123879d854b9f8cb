"""Models with windows, softcaps, sinks, ALiBi, layers of several sizes: transformers' answers, however they come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engine.runs import answers, mixed_requests, run
from tests.support.models.tiny import build, config_of, prompt, save_tokenizer
from workers.engine import Completion, EngineConfig, EngineCore, Request, SamplingParams, SpeculationConfig
from workers.engine.models.executor import LoadedModel
from workers.engine.models.loading.load import load_model

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "every layer slides": ("Mistral", {"sliding_window": 13}),
    "alternating, softcap": ("Gemma2", {"sliding_window": 13, "attn_logit_softcapping": 5.0}),
    "alternating, sinks": ("GptOss", {"sliding_window": 13}),
    "ALiBi": ("Bloom", {}),
    "head sizes, shared keys": ("Gemma4Text", {"sliding_window": 13}),
}
WAYS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "ngram_min": 1, "max_draft_tokens": 6},
    "tree": {"method": "draft_model", "draft": "target", "tree_width": 3, "tree_nodes": 7},
    "int8": {"method": "draft_model", "draft": "target", "draft_dtype": "int8", "tree_width": 2},
    "self": {"method": "self", "skip": ("attn.1", "mlp.2"), "tree_width": 2},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "chunks": {"max_batch": 4, "max_step_tokens": 16, "block_size": 1, "kv_blocks": 400, "prefix_reuse": False},
    "preempting": {"max_batch": 32, "kv_blocks": 26, "block_size": 4},
}
CASES = [
    (model, way, setting)
    for model in MODELS
    for way in WAYS
    for setting in SETTINGS
    if model == "every layer slides" or (way, setting) in (("ngram", "chunks"), ("tree", "preempting"))
]
"""One model by every way in both settings; of the others each way in one."""
LONG = [Request(("long", seed), prompt(60, seed, 250), SamplingParams(max_tokens=30)) for seed in range(2)]
SHORT = [Request(("short", seed), prompt(5, seed, 250), SamplingParams(max_tokens=20)) for seed in range(9)]
REQUESTS = [*SHORT, *LONG, *mixed_requests(6, max_tokens=20)]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], World]:
    @cache
    def make(which: str) -> World:
        name, changes = MODELS[which]
        untouched, folder = build(config_of(name, **changes)), tmp_path_factory.mktemp("windows")
        untouched.save_pretrained(folder)
        save_tokenizer(folder)
        expected = [
            untouched.generate(torch.tensor([one.prompt_token_ids]), max_new_tokens=30, do_sample=False)[0, 60:]
            for one in LONG
        ]
        model = load_model(EngineConfig(str(folder), max_model_len=200))
        core = EngineCore(EngineConfig(str(folder), max_batch=1, kv_blocks=200, prefix_reuse=False), model=model)
        return World(model, run(core, REQUESTS), [tokens.tolist() for tokens in expected])

    return make


@dataclass
class World:
    model: LoadedModel
    truth: dict[object, Completion]
    expected: list[list[int]]
    """Of transformers, for the long prompts."""


@pytest.mark.parametrize("model", MODELS)
def test_plain_decoding_is_that_of_transformers(model: str, worlds: Callable[[str], World]) -> None:
    world = worlds(model)
    assert [list(world.truth[one.id].token_ids) for one in LONG] == world.expected


@pytest.mark.parametrize(("model", "way", "setting"), CASES)
def test_speculation_changes_no_token(model: str, way: str, setting: str, worlds: Callable[[str], World]) -> None:
    world = worlds(model)
    speculation = SpeculationConfig(policy="fixed", **WAYS[way])
    core = EngineCore(EngineConfig(world.model.name, speculation=speculation, **SETTINGS[setting]), model=world.model)
    done = run(core, REQUESTS)
    assert tokens_of(done) == tokens_of(world.truth)
    if world.model.report.batch_invariant:
        assert answers(done) == answers(world.truth), "logprobs too"
    if way != "ngram":
        assert sum(completion.stats.accepted for completion in done.values()) > len(REQUESTS)
    if setting == "preempting":
        assert core.batcher.num_preemptions > 0


def tokens_of(done: dict[object, Completion]) -> dict[object, tuple[int, ...]]:
    return {key: completion.token_ids for key, completion in done.items()}


def test_a_window_in_every_layer_leaves_room_for_more_sequences(tmp_path: Path) -> None:
    """Fewer blocks than the answers are long: without those behind the windows somebody would be preempted."""
    build(config_of("Mistral", sliding_window=13)).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    core = EngineCore(EngineConfig(str(tmp_path), kv_blocks=32, block_size=4, prefix_reuse=False, max_batch=4))
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    run(core, [Request(seed, prompt(10, seed, 250), params) for seed in range(4)])
    assert core.batcher.num_preemptions == 0
