"""Nothing of a checkpoint is executed, or even downloaded, unless the job asks for it by name."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support.models.hub import serve_hub
from tests.support.models.tiny import config_of, save, write_gguf
from workers.engine.api.config import EngineConfig, SpeculationConfig
from workers.engine.api.errors import EngineError, UnsupportedModel
from workers.engine.measure.preflight import Preflight
from workers.engine.models.loading.load import load_model

EVIL = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
(Path({marker!r})).touch()
class MyConfig(LlamaConfig):
    model_type = "{model_type}"
class MyModel(LlamaForCausalLM):
    config_class = MyConfig
class MyTokenizer(PreTrainedTokenizerFast):
    pass
def generate(*arguments, **options):
    pass
"""


class Trap:
    """A checkpoint that would leave a mark if anything of it were executed."""

    def __init__(self, folder: Path, llama: str) -> None:
        self.model = folder / "model"
        shutil.copytree(llama, self.model)
        self._marker = folder / "executed"
        self.code()

    @property
    def sprung(self) -> bool:
        return self._marker.exists()

    def code(self, model_type: str = "llama") -> None:
        for name in ("evil.py", "custom_generate/generate.py"):
            path = self.model / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(EVIL.format(marker=str(self._marker), model_type=model_type))

    def change(self, file: str, **values: Any) -> None:
        path = self.model / file
        before = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**before, **values}))

    def pickled(self) -> bytes:
        return pickle.dumps(_Mark(str(self._marker)), protocol=2)


class _Mark:
    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path(self._path),)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("llama"), config_of("Llama"))


@pytest.fixture
def trap(tmp_path: Path, llama: str) -> Trap:
    return Trap(tmp_path, llama)


def _auto_map(trap: Trap) -> None:
    trap.change("config.json", auto_map={"AutoModelForCausalLM": "evil.MyModel", "AutoConfig": "evil.MyConfig"})
    trap.change("tokenizer_config.json", auto_map={"AutoTokenizer": [None, "evil.MyTokenizer"]})


def _old_auto_map(trap: Trap) -> None:
    trap.change("tokenizer_config.json", auto_map=[None, "evil.MyTokenizer"], tokenizer_class="MyTokenizer")


def _only_own_code(trap: Trap) -> None:
    _auto_map(trap)
    trap.code("brand_new")
    trap.change("config.json", model_type="brand_new")


def _processor(trap: Trap) -> None:
    for file in ("processor_config.json", "preprocessor_config.json", "generation_config.json"):
        trap.change(file, auto_map={"AutoProcessor": "evil.MyTokenizer"}, processor_class="MyTokenizer")
    trap.change("tokenizer_config.json", tokenizer_class="AutoProcessor")


def _kernels(trap: Trap) -> None:
    asked = {"_attn_implementation": "someone/kernel", "attn_implementation": "someone/kernel"}
    trap.change("config.json", **asked, experts_implementation="someone/kernel")


def _pickled_weights(trap: Trap) -> None:
    (trap.model / "model.safetensors").unlink()
    (trap.model / "pytorch_model.bin").write_bytes(trap.pickled())


def _pickled_shard(trap: Trap) -> None:
    (trap.model / "model.safetensors").rename(trap.model / "a.safetensors")
    (trap.model / "b.bin").write_bytes(trap.pickled())
    shards = {"model.embed_tokens.weight": "a.safetensors", "model.norm.weight": "b.bin"}
    trap.change("model.safetensors.index.json", metadata={}, weight_map=shards)


REFUSED = {_old_auto_map, _only_own_code, _processor, _pickled_weights, _pickled_shard}
TRAPS: list[Callable[[Trap], None]] = [
    _auto_map, _old_auto_map, _only_own_code, _processor, _kernels, _pickled_weights, _pickled_shard,
]  # fmt: skip


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("bait", TRAPS)
def test_nothing_of_a_checkpoint_is_executed(trap: Trap, llama: str, bait: Callable[[Trap], None], role: str) -> None:
    bait(trap)
    model = str(trap.model)
    config = EngineConfig(target=model)
    if role == "draft":
        config = EngineConfig(target=llama, speculation=SpeculationConfig("draft_model", draft=model))
    with suppress(EngineError):
        Preflight(config)
    assert not trap.sprung
    with pytest.raises(EngineError) if bait in REFUSED else nullcontext():
        load_model(EngineConfig(target=model))
    assert not trap.sprung


@pytest.mark.parametrize("file", ["medusa_lm_head.pt", "pytorch_model.bin"])
def test_pickled_heads_and_layers_hold_tensors_alone(trap: Trap, llama: str, file: str) -> None:
    (trap.model / "model.safetensors").unlink()
    (trap.model / file).write_bytes(trap.pickled())
    trap.change("config.json", medusa_num_heads=1)
    method = "medusa" if "medusa" in file else "eagle"
    with pytest.raises(UnsupportedModel, match="tensors alone"):
        Preflight(EngineConfig(target=llama, speculation=SpeculationConfig(method, draft=str(trap.model))))
    assert not trap.sprung


def test_the_neighbours_of_a_gguf_file_are_not_its_own(trap: Trap, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("NIGHTDRAFT_CACHE", str(tmp_path / "cache"))
    _auto_map(trap)
    trap.change("config.json", model_type="brand_new")
    file = trap.model / "model.gguf"
    write_gguf(file)
    for trusting in (False, True):
        load_model(EngineConfig(target=str(file), trust_remote_code=trusting))
        assert not trap.sprung


def test_code_runs_when_the_job_asks_and_is_recorded(trap: Trap) -> None:
    _auto_map(trap)
    loaded = load_model(EngineConfig(target=str(trap.model), trust_remote_code=True))
    assert trap.sprung
    assert set(loaded.report.remote_code) == {"evil.py", "custom_generate/generate.py"}
    without = load_model(EngineConfig(target=str(trap.model)))
    assert without.report.remote_code == {}
    (trap.model / "evil.py").write_text((trap.model / "evil.py").read_text() + "\n")
    changed = load_model(EngineConfig(target=str(trap.model), trust_remote_code=True))
    assert len({loaded.content_hash, without.content_hash, changed.content_hash}) == 3


def test_code_of_another_repository_does_not_run(trap: Trap) -> None:
    _auto_map(trap)
    trap.change("tokenizer_config.json", auto_map={"AutoTokenizer": [None, "someone/else--evil.MyTokenizer"]})
    with pytest.raises(UnsupportedModel, match=r"names code of another repository .someone/else--evil\.MyTokenizer"):
        load_model(EngineConfig(target=str(trap.model), trust_remote_code=True))
    assert not trap.sprung


def test_a_model_that_has_no_other_code_says_what_to_set(trap: Trap) -> None:
    _only_own_code(trap)
    with pytest.raises(UnsupportedModel, match=r"engine\.trust_remote_code to true"):
        load_model(EngineConfig(target=str(trap.model)))


def test_python_files_are_downloaded_only_when_the_job_asks(
    trap: Trap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _auto_map(trap)
    with serve_hub(trap.model, monkeypatch) as asked:
        for trusting in (False, True):
            monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / f"cache-{trusting}"))
            asked.clear()
            load_model(EngineConfig(target="someone/some-model", trust_remote_code=trusting))
            assert any(path.endswith("/model.safetensors") for path in asked)
            assert any(path.endswith(".py") for path in asked) == trusting
            assert trap.sprung == trusting
