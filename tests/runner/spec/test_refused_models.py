"""Whatever is wrong with a model is one line that names it, with exit code 2, before anything is stored or loaded."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import transformers
from safetensors.torch import save_file

from tests.support.cli import Cli
from tests.support.models.tiny import COMMON, GROUPED, build, config_of, save, save_tokenizer
from workers.engine.api.config import EngineConfig
from workers.engine.models.loading.load import load_model

Make = Callable[[Path], object]
LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save(tmp_path_factory.mktemp("llama"), config_of("Llama")))


def config(**changes: Any) -> Make:
    def make(model: Path) -> None:
        file = model / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return make


def quantised(method: str, **options: Any) -> Make:
    return config(quantization_config={"quant_method": method, **options})


def text(file: str, content: str) -> Make:
    return lambda model: (model / file).write_text(content)


def without(*files: str) -> Make:
    return lambda model: [(model / file).unlink() for file in files]


def architecture(name: str, **options: Any) -> Make:
    def make(model: Path) -> None:
        shutil.rmtree(model)
        build(getattr(transformers, f"{name}Config")(**options)).save_pretrained(model)
        save_tokenizer(model)

    return make


def adapter_alone(model: Path) -> None:
    shutil.rmtree(model)
    model.mkdir()
    text("adapter_config.json", '{"base_model_name_or_path": "someone/base"}')(model)


def cut_off(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def random_head(model: Path) -> None:
    save_file({}, model / "model.safetensors", metadata={"format": "pt"})


SMALL_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
REFUSED: dict[str, tuple[Make, str]] = {
    "no lm_head, nor anything": (random_head, "(llama): 30 tensors of the model missing in its files"),
    "weights cut off": (cut_off, "model.safetensors: cut off"),
    "weights not pulled": (text("model.safetensors", LFS_POINTER), "model.safetensors: a git-lfs pointer"),
    "weights of other sizes": (config(intermediate_size=96), "the model needs [48, 96]"),
    "no weights": (without("model.safetensors"), "no .safetensors file"),
    "tokenizer not pulled": (text("tokenizer.json", LFS_POINTER), "tokenizer.json: a git-lfs pointer"),
    "tokenizer broken": (text("tokenizer.json", '{"model": '), "its tokenizer: "),
    "tokenizer empty": (text("tokenizer.json", "{}"), "its tokenizer: "),
    "tokenizer missing": (without("tokenizer.json", "tokenizer_config.json"), "tokenizer"),
    "tokenizer files missing": (without("tokenizer.json"), "tokenizer"),
    "tokenizer config alone": (
        lambda model: (
            without("tokenizer.json")(model),
            text("tokenizer_config.json", '{"tokenizer_class": "GPT2Tokenizer"}')(model),
        ),
        "its tokenizer has no tokens",
    ),
    "tokenizer config of another kind": (text("tokenizer_config.json", "[]"), "its tokenizer: "),
    "generation config of another kind": (text("generation_config.json", "[]"), "generation_config.json: "),
    "config is a list": (text("config.json", "[]"), "config.json: "),
    "config is no JSON": (text("config.json", "{"), "config.json: "),
    "config not pulled": (text("config.json", LFS_POINTER), "config.json: a git-lfs pointer"),
    "text for a number": (config(num_hidden_layers="3"), "'num_hidden_layers' expected int"),
    "null for a number": (config(hidden_size=None), "'hidden_size' expected int"),
    "fraction for a number": (config(vocab_size=3.5), "'vocab_size' expected int"),
    "no heads": (config(num_attention_heads=0), "config.json: ZeroDivisionError"),
    "heads that do not divide": (config(num_attention_heads=7), "not a multiple"),
    "no context": (config(max_position_embeddings=-3), "a context of -3 tokens"),
    "unknown dtype": (config(dtype="float9"), "float9"),
    "dtype of another kind": (config(dtype=7), "config.json: dtype is 7"),
    "unknown activation": (config(hidden_act="glub"), "cannot be built from its config.json: KeyError: 'glub'"),
    "unknown rope": (
        config(rope_parameters={"rope_type": "brand-new", "rope_theta": 1e4}),
        "(llama) cannot be built from its config.json: KeyError: 'brand-new'",
    ),
    "rope of another kind": (config(rope_parameters=5), "'rope_parameters'"),
    "unknown model type": (config(model_type="brand_new"), "brand_new"),
    "weights elsewhere": (config(transformers_weights="../x.safetensors"), "transformers_weights"),
    "gptq": (quantised("gptq", bits=4, group_size=128), "(llama) is quantised by gptq: ImportError"),
    "awq": (quantised("awq", bits=4, group_size=128), "is quantised by awq: ImportError"),
    "bitsandbytes": (quantised("bitsandbytes", load_in_4bit=True), "is quantised by bitsandbytes: ImportError"),
    "compressed-tensors": (
        quantised("compressed-tensors", format="pack-quantized", config_groups={}),
        "is quantised by compressed-tensors: ImportError",
    ),
    "hqq": (quantised("hqq"), "is quantised by hqq: ImportError"),
    "torchao": (quantised("torchao", quant_type={"default": "x"}), "is quantised by torchao: "),
    "unknown quantisation": (quantised("modelopt"), "is quantised by modelopt, which transformers does not know"),
    "unnamed quantisation": (config(quantization_config={}), "is quantised by an unnamed method"),
    "adapter alone": (adapter_alone, "holds an adapter (adapter_config.json for someone/base)"),
    "adapter beside weights": (text("adapter_config.json", "{}"), "holds an adapter (adapter_config.json)"),
    "multimodal": (
        architecture("Gemma3", text_config={**GROUPED, "head_dim": 8}, vision_config=SMALL_VISION),
        "(gemma3) is a multimodal model (it has a part for vision)",
    ),
    "encoder and decoder": (architecture("Bart", vocab_size=320, d_model=48, decoder_layers=1), "(bart)"),
    "state space": (
        architecture("Mamba2", vocab_size=320, hidden_size=48, num_hidden_layers=1, num_heads=6, head_dim=16),
        "(mamba2)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_with_a_model_is_one_line(
    cli: Cli, write_prompts: Callable[..., Path], llama: Path, name: str
) -> None:
    make, words = REFUSED[name]
    make(shutil.copytree(llama, cli.folder / "model"))
    result = cli("run", str(write_prompts(["p"])), "--target", "./model", "--dry-run", code=2)
    assert words in result.stderr
    assert "model" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    assert not (cli.folder / "jobs.db").exists()


def test_so_is_what_is_wrong_with_a_draft(cli: Cli, write_prompts: Callable[..., Path], llama: Path) -> None:
    config(rope_parameters={"rope_type": "brand-new", "rope_theta": 1e4})(shutil.copytree(llama, cli.folder / "draft"))
    arguments = ("--target", str(llama), "--method", "draft_model", "--draft", "./draft")
    result = cli("run", str(write_prompts(["p"])), *arguments, code=2)
    assert "draft (llama) cannot be built from its config.json: KeyError: 'brand-new'" in result.stderr
    assert cli.json("status") == []


@pytest.mark.parametrize(("name", "positions"), [("GPT2", 20), ("GPT2", 48), ("GPT2", 64), ("OPT", 64)])
def test_models_with_few_learned_positions_load(tmp_path: Path, name: str, positions: int) -> None:
    length = {"n_positions": positions} if name == "GPT2" else {"max_position_embeddings": positions}
    loaded = load_model(EngineConfig(target=save(tmp_path, config_of(name, **length))))
    assert loaded.facts.max_model_len == positions


def test_a_tokenizer_model_alone_is_enough(tmp_path: Path) -> None:
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the quick brown fox jumps over the lazy dog"] * 9),
        model_writer=written, vocab_size=50, model_type="bpe", minloglevel=2,
    )  # fmt: skip
    build(transformers.LlamaConfig(**{**COMMON, "num_key_value_heads": 2})).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(written.getvalue())
    tokenizer = load_model(EngineConfig(target=str(tmp_path))).tokenizer
    assert tokenizer.decode(tokenizer.encode("the lazy fox")) == "the lazy fox"
