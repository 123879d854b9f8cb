"""A checkpoint with tensors missing, left over or of other shapes is refused by name, before any weights are read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForSequenceClassification

from tests.support.models.hub import serve_hub
from tests.support.models.tiny import build, config_of, save, save_tokenizer, write_gguf
from workers.engine.api.config import EngineConfig, SpeculationConfig
from workers.engine.api.errors import EngineError, UnsupportedModel
from workers.engine.measure.preflight import Preflight
from workers.engine.models.loading.load import load_model

Tensors = dict[str, torch.Tensor]
Q = "model.layers.1.self_attn.q_proj"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save(tmp_path_factory.mktemp("llama"), config_of("Llama", tie_word_embeddings=False)))


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save(tmp_path_factory.mktemp("mixtral"), config_of("Mixtral")))


def change(model: Path, tensors: Callable[[Tensors], object] = lambda _: None, **config: Any) -> None:
    held = load_file(model / "model.safetensors")
    tensors(held)
    save_file(held, model / "model.safetensors", metadata={"format": "pt"})
    file = model / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))


def _gptq(tensors: Tensors) -> None:
    tensors.pop(f"{Q}.weight")
    tensors |= {f"{Q}.{part}": torch.ones(6, 48, dtype=torch.int32) for part in ("qweight", "qzeros")}
    tensors |= {f"{Q}.scales": torch.ones(1, 48)}


def _modelopt(tensors: Tensors) -> None:
    tensors[f"{Q}.weight"] = tensors[f"{Q}.weight"].to(torch.float8_e4m3fn)
    tensors |= {f"{Q}.weight_scale": torch.ones(()), f"{Q}.input_scale": torch.ones(())}


def _scales_alone(tensors: Tensors) -> None:
    tensors |= {f"{Q}.weight_scale": torch.ones(()), f"{Q}.input_scale": torch.ones(())}


def _bitsandbytes(tensors: Tensors) -> None:
    tensors[f"{Q}.weight"] = torch.ones(48 * 24, 1, dtype=torch.uint8)
    tensors |= {f"{Q}.weight.absmax": torch.ones(36), f"{Q}.weight.quant_map": torch.ones(16)}


def _float8(tensors: Tensors) -> None:
    tensors[f"{Q}.weight"] = tensors[f"{Q}.weight"].to(torch.float8_e5m2)


def _one_expert_less(tensors: Tensors) -> None:
    for part in ("w1", "w2", "w3"):
        tensors.pop(f"model.layers.1.block_sparse_moe.experts.3.{part}.weight")


REFUSED: list[tuple[Callable[[Tensors], object], dict[str, Any], str]] = [
    (lambda t: t.pop("lm_head.weight"), {}, r"1 tensor of the model missing in its files: lm_head\.weight"),
    (lambda t: None, {"num_hidden_layers": 4}, r"9 tensors of the model missing in its files: model\.layers\.3\."),
    (lambda t: None, {"num_hidden_layers": 2}, r"9 tensors in its files that the model has no place for: model"),
    (lambda t: t.update(extra=torch.ones(3)), {}, "1 tensor in its files that the model has no place for: extra"),
    (lambda t: t.update({f"{Q}.bias": torch.ones(48)}), {}, r"has no place for: .*\.self_attn\.q_proj\.bias"),
    (lambda t: None, {"intermediate_size": 96}, r"weight is \[48, 80\], the model needs \[48, 96\], and 8 more"),
    (lambda t: None, {"vocab_size": 400}, r"is \[320, 48\], the model needs \[400, 48\]"),
    (_gptq, {}, "GPTQ or AWQ"),
    (_modelopt, {}, "FP8 or ModelOpt weights .tensor .*q_proj.weight is F8_E4M3., of which config.json says nothing"),
    (_scales_alone, {}, "has no place for: .*input_scale.*FP8 or ModelOpt"),
    (_bitsandbytes, {}, "bitsandbytes weights"),
    (_float8, {}, "quantised weights .tensor .*q_proj.weight is F8_E5M2"),
]  # fmt: skip


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize(("tensors", "config", "message"), REFUSED)
def test_what_is_missing_left_over_or_of_another_shape_is_refused(
    tmp_path: Path, llama: Path, tensors: Any, config: dict[str, Any], message: str, role: str
) -> None:
    model = shutil.copytree(llama, tmp_path / "model")
    change(model, tensors, **config)
    chosen = EngineConfig(target=str(model))
    if role == "draft":
        chosen = EngineConfig(target=str(llama), speculation=SpeculationConfig("draft_model", draft=str(model)))
    with pytest.raises(UnsupportedModel, match=message):
        Preflight(chosen)
    if role == "target":
        with pytest.raises(UnsupportedModel, match=message):
            load_model(chosen)


def test_an_expert_that_is_missing_is_refused(tmp_path: Path, mixtral: Path) -> None:
    model = shutil.copytree(mixtral, tmp_path / "model")
    load_model(EngineConfig(target=str(model)))
    change(model, _one_expert_less)
    with pytest.raises(UnsupportedModel, match=r"experts.* is \[3, .*the model needs \[4, "):
        Preflight(EngineConfig(target=str(model)))


@pytest.mark.parametrize("kind", [AutoModel, AutoModelForSequenceClassification])
def test_models_for_other_tasks_are_refused(tmp_path: Path, kind: Any) -> None:
    kind.from_config(config_of("Llama", tie_word_embeddings=False)).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"missing in its files: lm_head\.weight"):
        Preflight(EngineConfig(target=str(tmp_path)))


def _with_inverse_frequencies(model: Path) -> None:
    change(model, lambda t: t.update({f"{Q[:22]}.rotary_emb.inv_freq": torch.ones(4)}))


def _tied(model: Path) -> None:
    change(model, lambda t: t.pop("lm_head.weight"), tie_word_embeddings=True)


def _tied_but_different(model: Path) -> None:
    change(model, tie_word_embeddings=True)


def _sharded(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    halves = [dict(list(tensors.items())[::2]), dict(list(tensors.items())[1::2])]
    for name, half in zip("ab", halves, strict=True):
        save_file(half, model / f"{name}.safetensors", metadata={"format": "pt"})
    shards = {key: f"{name}.safetensors" for name, half in zip("ab", halves, strict=True) for key in half}
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))


@pytest.mark.parametrize("harmless", [_with_inverse_frequencies, _tied, _tied_but_different, _sharded])
def test_what_families_leave_out_or_carry_along_is_allowed(
    tmp_path: Path, llama: Path, harmless: Callable[[Path], None]
) -> None:
    model = shutil.copytree(llama, tmp_path / "model")
    harmless(model)
    Preflight(EngineConfig(target=str(model)))
    load_model(EngineConfig(target=str(model)))


def test_masks_in_old_files_are_allowed(tmp_path: Path) -> None:
    target = save(tmp_path, config_of("GPT2"))
    masks = {"bias": torch.ones(1, 1, 256, 256, dtype=torch.uint8), "masked_bias": torch.tensor(-1e4)}
    change(tmp_path, lambda t: t.update({f"transformer.h.0.attn.{name}": mask for name, mask in masks.items()}))
    load_model(EngineConfig(target=target))


@pytest.mark.parametrize("sharded", [False, True])
def test_of_a_model_on_the_hub_the_headers_are_read_before_its_weights(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch, sharded: bool
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    model = shutil.copytree(llama, tmp_path / "model")
    if sharded:
        _sharded(model)
    with serve_hub(model, monkeypatch) as asked:
        Preflight(EngineConfig(target="someone/some-model"))
        assert [path for path in asked if path.endswith(".safetensors")] == []
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "again"))
        for use in (Preflight, load_model):
            with pytest.raises(UnsupportedModel, match="9 tensors of the model missing in its files"):
                use(EngineConfig(target="someone/some-model"))
            assert [path for path in asked if path.endswith(".safetensors")] == []


def test_pickled_weights_on_the_hub_are_judged_once_they_are_here(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    model = shutil.copytree(llama, tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    torch.save(tensors, model / "pytorch_model.bin")
    with serve_hub(model, monkeypatch):
        Preflight(EngineConfig(target="someone/some-model"))
        load_model(EngineConfig(target="someone/some-model"))
        torch.save({key: tensors[key] for key in tensors if key != "lm_head.weight"}, model / "pytorch_model.bin")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "again"))
        with pytest.raises(UnsupportedModel, match="1 tensor of the model missing in its files: lm_head"):
            load_model(EngineConfig(target="someone/some-model"))


def _lfs_pointer(model: Path) -> None:
    (model / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")


def _cut_off(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def _cut_off_early(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])


def _empty(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"")


def _junk(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0" + b"not json at all!" * 9)


def _shard_missing(model: Path) -> None:
    _sharded(model)
    (model / "b.safetensors").unlink()


def _shard_elsewhere(model: Path) -> None:
    (model / "model.safetensors").rename(model / "a.safetensors")
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../a.safetensors"}}')


def _index_broken(model: Path) -> None:
    (model / "model.safetensors").rename(model / "a.safetensors")
    (model / "model.safetensors.index.json").write_text('{"weight_map": [')


def _no_index(model: Path) -> None:
    (model / "model.safetensors").rename(model / "model-00001-of-00001.safetensors")


def _twice(model: Path) -> None:
    _sharded(model)
    save_file(load_file(model / "a.safetensors") | load_file(model / "b.safetensors"), model / "b.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_lfs_pointer, "a git-lfs pointer, not the file itself"),
        (_cut_off, "cut off, 100 bytes are missing at its end"),
        (_cut_off_early, r"cut off in its header \(100 bytes\)"),
        (_empty, r"not a safetensors file, or cut off in its header \(0 bytes\)"),
        (_junk, "not a safetensors file .JSONDecodeError"),
        (_shard_missing, r"names b\.safetensors, which is not there"),
        (_shard_elsewhere, r"names '\.\./a\.safetensors', which is no .safetensors file beside it"),
        (_index_broken, "no index of shards"),
        (_no_index, "neither model.safetensors nor .*, only model-00001-of-00001.safetensors"),
        (_twice, r"is in a\.safetensors as well"),
    ],
)
def test_damaged_weight_files_are_named(
    tmp_path: Path, llama: Path, damage: Callable[[Path], None], message: str
) -> None:
    model = shutil.copytree(llama, tmp_path / "model")
    damage(model)
    for use in (Preflight, load_model):
        with pytest.raises(EngineError, match=message) as caught:
            use(EngineConfig(target=str(model)))
        assert str(caught.value).count("\n") == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blk.0.attn_norm": None}, r"missing in its files: model\.layers\.0\.input_layernorm\.weight"),
        ({"mystery": (3,)}, r"has no place for: mystery\.weight"),
        ({"rope_freqs": (8,)}, r"has no place for: rope_freqs\.weight.*safetensors"),
        ({"output": (262, 32)}, r"lm_head\.weight is \[262, 32\], the model needs \[259, 32\]"),
    ],
)
def test_an_incomplete_gguf_file_is_refused_and_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.setenv("NIGHTDRAFT_CACHE", str(tmp_path / "cache"))
    with pytest.raises(UnsupportedModel, match=message):
        load_model(EngineConfig(target=str(write_gguf(tmp_path / "model.gguf", changes))))
    assert list((tmp_path / "cache").rglob("*.safetensors")) == []


@pytest.mark.parametrize(
    ("keep", "message"),
    [(0, "not a GGUF file"), (2000, "model.gguf: "), (50_000, "model.gguf: "), (-1, "git-lfs pointer")],
)
def test_a_damaged_gguf_file_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: int, message: str
) -> None:
    monkeypatch.setenv("NIGHTDRAFT_CACHE", str(tmp_path / "cache"))
    file = write_gguf(tmp_path / "model.gguf", {})
    whole = file.read_bytes()
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\n" if keep < 0 else whole[:keep])
    for use in (Preflight, load_model):
        with pytest.raises(UnsupportedModel, match=message):
            use(EngineConfig(target=str(file)))


def test_a_model_made_here_is_complete(tmp_path: Path) -> None:
    build(config_of("Llama")).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    Preflight(EngineConfig(target=str(tmp_path)))
