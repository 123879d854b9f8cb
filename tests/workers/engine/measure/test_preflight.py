"""What would keep an engine from starting shows before it starts, in the same words, without a weight being read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.drafts.weights import (
    LAYER,
    eagle1_tensors,
    eagle3_tensors,
    random_heads,
    safeailab3,
    write_eagle,
    write_heads,
)
from tests.support.models.tiny import ACCEPTED, VOCAB, WEIGHED, config_of, save
from workers.engine.api.config import EngineConfig, SpeculationConfig
from workers.engine.api.errors import EngineError
from workers.engine.api.request import Request
from workers.engine.api.sampling_params import SamplingParams
from workers.engine.core import EngineCore
from workers.engine.measure.preflight import Preflight
from workers.engine.models.loading.load import load_draft, load_model, outline_draft, outline_model
from workers.engine.models.loading.sources import resolve
from workers.engine.speculators.self.skip_file import SkipFile

Options = Callable[[Path], dict[str, Any]]
"""Writes what a mistake needs into a directory; the options of the speculation."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("llama"), config_of("Llama", num_hidden_layers=8))


@pytest.fixture(autouse=True)
def nothing_calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIGHTDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def eagle(config: dict[str, Any] | None = None, drop: str = "", pickled: bool = False, **tensors: Any) -> Options:
    def write(directory: Path) -> dict[str, Any]:
        found = {**eagle3_tensors(), **tensors}
        found.pop(drop, None)
        return {"method": "eagle", "draft": write_eagle(directory, config or safeailab3(), found, pickled=pickled)}

    return write


def medusa(drop: str = "", tree: str = "", hidden: int = 48, **options: Any) -> Options:
    def write(directory: Path) -> dict[str, Any]:
        heads = random_heads(hidden=hidden)
        heads.pop(drop, None)
        draft = write_heads(directory, heads)
        if tree:
            (directory / "medusa_tree.json").write_text(tree)
        return {"method": "medusa", "draft": draft, **options}

    return write


def spoilt(good: Options, name: str, content: str | None) -> Options:
    """With a file of the draft replaced, or removed."""

    def write(directory: Path) -> dict[str, Any]:
        options = good(directory)
        (directory / name).unlink() if content is None else (directory / name).write_text(content)
        return options

    return write


def skipping(content: str | None = None, **options: Any) -> Options:
    def write(directory: Path) -> dict[str, Any]:
        if content is not None:
            (directory / "skip.json").write_text(content)
            return {"method": "self", "skip_file": str(directory / "skip.json")}
        return {"method": "self", **options}

    return write


def draft_model(shift: int = 0, context: int = 256, **options: Any) -> Options:
    """With the target's vocabulary, or one whose ids are shifted."""

    def write(directory: Path) -> dict[str, Any]:
        config = config_of("Llama", num_hidden_layers=1, max_position_embeddings=context)
        return {"method": "draft_model", "draft": save(directory, config, shift=shift), **options}

    return write


OTHER_MODEL = json.dumps(
    {"target": "x", "content_hash": "abc", "skip": ["attn.1"], "acceptance": 0.5, "cost": 0.5, "draft_tokens": 3,
     "predicted_speedup": 1.1}
)  # fmt: skip
GOOD: dict[str, Options] = {
    "eagle 3": eagle(),
    "eagle 3, pickled": eagle(pickled=True),
    "eagle 3, own vocabulary": eagle(safeailab3(draft_vocab_size=100), **eagle3_tensors(draft_vocab=100)),
    "eagle 1": lambda directory: {"method": "eagle", "draft": write_eagle(directory, LAYER, eagle1_tensors())},
    "medusa": medusa(),
    "medusa, int8": medusa(draft_dtype="int8"),
    "self": skipping(skip=("attn.1", "mlp.5")),
    "draft_model": draft_model(),
    "draft_model, mapped": draft_model(shift=7),
    "draft_model, int8": draft_model(draft_dtype="int8"),
    "draft_model, itself in int8": lambda _: {"method": "draft_model", "draft": "target", "draft_dtype": "int8"},
    "all that need no draft": lambda _: {"method": "suffix", "row_methods": ("ngram", "none")},
}
WRONG: dict[str, tuple[str, Options]] = {
    "self, nothing calibrated": (
        "does not know which sublayers",
        skipping(),
    ),
    "self, no skip file": (
        "No such file",
        skipping(skip_file="/no/such/file.json"),
    ),
    "self, skip file of another kind": (
        "no calibrated skip set",
        skipping('{"skip": 3}'),
    ),
    "self, skip file is no JSON": (
        "no calibrated skip set",
        skipping("skip"),
    ),
    "self, skip file of another model": (
        "calibrated for x",
        skipping(OTHER_MODEL),
    ),
    "self, no such sublayer": (
        "'attn.8' is no sublayer",
        skipping(skip=("attn.8",)),
    ),
    "self, no such exit": (
        "exit_layer must be 1 to 7",
        skipping(exit_layer=8),
    ),
    "self, for rows alone": (
        "does not know which sublayers",
        lambda _: {"method": "none", "row_methods": ("self",)},
    ),
    "eagle, no directory": (
        "no such directory",
        lambda _: {"method": "eagle", "draft": "/no/such/place"},
    ),
    "eagle, nothing on the hub": (
        "the hub did not give it",
        lambda _: {"method": "eagle", "draft": "someone/some-layer"},
    ),
    "eagle, no config": (
        "has no config.json",
        spoilt(eagle(), "config.json", None),
    ),
    "eagle, broken config": (
        "Expecting property name",
        spoilt(eagle(), "config.json", "{"),
    ),
    "eagle, no weights": (
        "none of model.safetensors",
        spoilt(eagle(), "model.safetensors", None),
    ),
    "eagle, broken weights": (
        "cannot be read as a file of tensors",
        spoilt(eagle(), "model.safetensors", "not a tensor in sight"),
    ),
    "eagle, broken pickle": (
        "cannot be read as a file of tensors",
        spoilt(eagle(pickled=True), "pytorch_model.bin", "not a tensor in sight"),
    ),
    "eagle, missing tensor": (
        "fc.weight [48, 144] is missing",
        eagle(drop="fc.weight"),
    ),
    "eagle, missing tensor, pickled": (
        "norm.weight [48] is missing",
        eagle(drop="norm.weight", pickled=True),
    ),
    "eagle, unknown tensor": (
        "unknown tensors surprise",
        eagle(surprise=torch.zeros(3)),
    ),
    "eagle, mismatching tensor": (
        "lm_head.weight is [320, 40]",
        eagle(**{"lm_head.weight": torch.zeros(VOCAB, 40)}),
    ),
    "eagle, for another target": (
        "target_hidden_size is 4096",
        eagle(safeailab3(target_hidden_size=4096)),
    ),
    "eagle, unknown layer": (
        "model_type 'mamba'",
        eagle(safeailab3(model_type="mamba")),
    ),
    "eagle, broken vocabulary": (
        "d2t does not give distinct ids",
        eagle(safeailab3(draft_vocab_size=100), **eagle3_tensors(draft_vocab=100) | {"d2t": torch.full((100,), VOCAB)}),
    ),
    "medusa, no directory": (
        "no such directory",
        lambda _: {"method": "medusa", "draft": "/no/such/place"},
    ),
    "medusa, no config": (
        "has no config.json",
        spoilt(medusa(), "config.json", None),
    ),
    "medusa, config without heads": (
        "medusa_num_heads is missing",
        spoilt(medusa(), "config.json", "{}"),
    ),
    "medusa, no weights": (
        "none of medusa_lm_head.safetensors",
        spoilt(medusa(), "medusa_lm_head.safetensors", None),
    ),
    "medusa, missing tensor": (
        "2.1.weight [320, 48] is missing",
        medusa(drop="2.1.weight"),
    ),
    "medusa, for another target": (
        "0.0.linear.weight is [40, 40]",
        medusa(hidden=40),
    ),
    "medusa, too few heads": (
        "max_draft_tokens is 9",
        medusa(max_draft_tokens=9),
    ),
    "medusa, broken tree": (
        "not a tree of rank paths",
        medusa(tree="[]"),
    ),
    "draft_model, no directory": (
        "no such directory",
        lambda _: {"method": "draft_model", "draft": "/no/such/place"},
    ),
    "draft_model, heads": (
        "model_type",
        lambda directory: medusa()(directory) | {"method": "draft_model"},
    ),
    "draft_model, no weights": (
        "no .safetensors file",
        spoilt(draft_model(), "model.safetensors", None),
    ),
    "draft_model, another vocabulary": (
        "have different vocabularies",
        draft_model(shift=7, vocabulary="same"),
    ),
    "draft_model, a tree through text": (
        "drafts through text are chains",
        draft_model(shift=7, vocabulary="text", tree_width=2),
    ),
    "draft_model, scripted in int8": (
        "a scripted model has no weights",
        lambda _: {
            "method": "draft_model",
            "draft": "scripted:vocab=300",
            "draft_dtype": "int8",
        },
    ),
}


def refusal(start: Callable[[EngineConfig], object], config: EngineConfig) -> EngineError:
    with pytest.raises(EngineError) as caught:
        start(config)
    return caught.value


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_shows_in_the_words_of_the_engine(mistake: str, llama: str, tmp_path: Path) -> None:
    words, options = WRONG[mistake]
    config = EngineConfig(target=llama, speculation=SpeculationConfig(**options(tmp_path)))
    before, later = refusal(Preflight, config), refusal(EngineCore, config)
    assert words in str(before)
    assert (type(before), str(before)) == (type(later), str(later))


@pytest.mark.parametrize("options", [{"max_model_len": 999}, {"device": "warp"}, {"target": "/no/place"}])
def test_so_do_mistakes_about_the_target(options: dict[str, Any], llama: str) -> None:
    config = EngineConfig(**{"target": llama, **options})
    before, later = refusal(Preflight, config), refusal(EngineCore, config)
    assert (type(before), str(before)) == (type(later), str(later))


@pytest.mark.parametrize("name", GOOD)
def test_what_fits_passes_and_the_engine_starts(name: str, llama: str, tmp_path: Path) -> None:
    config = EngineConfig(target=llama, speculation=SpeculationConfig(**GOOD[name](tmp_path)), kv_blocks=64)
    Preflight(config)
    EngineCore(config)


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


def test_a_skip_set_is_that_of_the_very_weights(llama: str) -> None:
    config = EngineConfig(target=llama, speculation=SpeculationConfig(method="self"))
    SkipFile(llama, resolve(llama).content_hash(), ("attn.1",), 0.9, 0.6, 3, 1.2).write()
    Preflight(config)
    EngineCore(config)


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


@pytest.mark.parametrize(
    "request_",
    [
        Request(1, ()),
        Request(1, tuple(range(3, 103))),
        Request(1, (3, VOCAB)),
        Request(1, (3,), SamplingParams(stop_token_ids=(VOCAB,))),
        Request(1, (3,), SamplingParams(max_tokens=90)),
        Request(1, (3,), method="self"),
    ],
)
def test_a_request_is_refused_as_the_engine_would_refuse_it(request_: Request, llama: str) -> None:
    config = EngineConfig(target=llama, max_model_len=100, kv_blocks=4)
    completion = EngineCore(config).add(request_)
    assert completion is not None
    with pytest.raises(EngineError) as caught:
        Preflight(config).check(request_)
    assert (caught.value.code, str(caught.value)) == (completion.error_code, completion.error_message)
    Preflight(config).check(Request(1, (3,), SamplingParams(max_tokens=8)))


@pytest.mark.model
def test_a_gguf_file_is_outlined_without_being_converted(demo_model: Any, tmp_path: Path) -> None:
    config = EngineConfig(target=str(demo_model.path))
    flight = Preflight(config)
    assert flight.max_model_len == 8192
    assert flight.tokenizer.decode(flight.tokenizer.encode("Hello, wörld")) == "Hello, wörld"
    assert not (tmp_path / "cache").exists()
