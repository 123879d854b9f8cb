"""Sizes and memory are told from the files of a model, without its weights being read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.drafts.ways import GOOD, draft_model
from tests.support.models.tiny import ACCEPTED, WEIGHED, config_of, save
from workers.engine.api.config import EngineConfig, SpeculationConfig
from workers.engine.api.errors import EngineError
from workers.engine.api.request import Request
from workers.engine.api.sampling_params import SamplingParams
from workers.engine.core import EngineCore
from workers.engine.measure.preflight import Preflight
from workers.engine.models.loading.load import load_draft, load_model, outline_draft, outline_model

pytestmark = pytest.mark.usefixtures("nothing_calibrated")


def spoil(weights: Path) -> None:
    """Leave the header of a safetensors file, and let no tensor behind it hold a number."""
    whole = weights.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    weights.write_bytes(whole[:start] + b"\xff" * (len(whole) - start))


@pytest.mark.parametrize("name", GOOD)
def test_no_weights_of_a_model_are_read(name: str, tmp_path: Path) -> None:
    target = save(tmp_path / "target", config_of("Llama", num_hidden_layers=8))
    options = GOOD[name](tmp_path / "draft")
    for weights in tmp_path.glob("*/model.safetensors"):
        if options["method"] != "eagle" or weights.parent.name == "target":
            spoil(weights)
    Preflight(EngineConfig(target=target, speculation=SpeculationConfig(**options)))


@pytest.mark.parametrize(
    "name", ["all that need no draft", "self", "medusa", "eagle 3", "eagle 1", "draft_model, mapped"]
)
def test_kv_memory_holds_whatever_is_kept_of_cached_tokens(name: str, llama: str, tmp_path: Path) -> None:
    memory = 200_000
    config = EngineConfig(target=llama, speculation=SpeculationConfig(**GOOD[name](tmp_path)), kv_memory=memory)
    core = EngineCore(config)
    caches = [core.cache, *core.speculator.caches]
    kept = {
        "target": sum(pool.nbytes for pool in (*core.cache.keys, *core.cache.values)),
        "features": sum(pool.nbytes for pool in core.cache.hidden.values()),
        "draft": sum(pool.nbytes for cache in caches[1:] for pool in (*cache.keys, *cache.values)),
    }
    assert core.report()["kv_bytes"] == kept
    assert {cache.num_blocks for cache in caches} == {core.report()["kv_blocks"]}
    block = sum(kept.values()) // (core.cache.num_blocks + 1)
    assert memory - block < sum(kept.values()) <= memory
    assert bool(kept["features"]) == (config.speculation.method in ("medusa", "eagle"))
    assert bool(kept["draft"]) == (config.speculation.method in ("draft_model", "eagle"))
    longest = Request(1, (3,), SamplingParams(max_tokens=core.cache.num_blocks * 16))
    assert core.add(longest) is not None
    with pytest.raises(EngineError, match=f"KV cache holds {core.cache.num_blocks * 16}"):
        Preflight(config).check(longest)


OWN_SIZES = {"Mistral", "Gemma4Text", "Falcon", "Mpt"}


@pytest.mark.parametrize(
    ("name", "changes", "dtype"),
    [
        *((name, {}, torch.float32) for name in ACCEPTED),
        *((name, changes, torch.float32) for name, changes in WEIGHED if name in OWN_SIZES),
        ("Llama", {}, torch.bfloat16),
        ("Llama", {}, torch.float16),
    ],
)
def test_an_outline_has_the_sizes_of_the_loaded_model(
    name: str, changes: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    target = save(tmp_path, config_of(name, **changes), dtype=dtype)
    config = EngineConfig(target=target, max_model_len=200)
    outline, loaded = outline_model(config), load_model(config)
    assert outline.facts == loaded.facts
    assert outline.tokenizer.eos_token_ids == loaded.tokenizer.eos_token_ids
    assert (outline.vocabulary, outline.content_hash) == (loaded.vocabulary, loaded.content_hash)


def test_the_outline_of_a_draft_is_that_of_what_is_loaded(llama: str, tmp_path: Path) -> None:
    options = draft_model(context=128, draft_dtype="bfloat16")(tmp_path)
    config = EngineConfig(target=llama, speculation=SpeculationConfig(**options))
    loaded = load_draft(config, load_model(config))
    outline = outline_draft(config, outline_model(config))
    assert outline.facts == loaded.facts
    assert loaded.facts.max_model_len == 128


@pytest.mark.model
def test_a_gguf_file_is_outlined_without_being_converted(demo_model: Any, tmp_path: Path) -> None:
    config = EngineConfig(target=str(demo_model.path))
    flight = Preflight(config)
    assert flight.max_model_len == 8192
    assert flight.tokenizer.decode(flight.tokenizer.encode("Hello, wörld")) == "Hello, wörld"
    assert not (tmp_path / "cache").exists()
