"""Checkpoints of EAGLE layers: what fits is loaded, everything else is refused with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.drafts.eagle_runs import AUX, FEATURES, INPUT_NORM, NORMS, Run
from tests.support.drafts.weights import (
    HIDDEN,
    LAYER,
    eagle1_tensors,
    eagle3_tensors,
    library3,
    safeailab3,
    tiny_target,
    write_eagle,
)
from tests.support.engine.runs import engine as scripted_engine
from tests.support.models.tiny import VOCAB
from workers.engine import SpeculationConfig
from workers.engine.api.errors import UnsupportedModel
from workers.engine.attention.interface import load_attention
from workers.engine.models.layers.precision import Precision
from workers.engine.speculators.eagle.checkpoint import open_eagle
from workers.engine.speculators.eagle.layer import EagleModel, build_eagle
from workers.engine.state.batch import Feed

Tensors = dict[str, torch.Tensor]


def load_eagle(directory: Path, config: dict[str, Any], tensors: Tensors, target: Any = None) -> EagleModel:
    parsed, found = open_eagle(write_eagle(directory, config, tensors), FEATURES, VOCAB)
    return build_eagle(parsed, found, target or tiny_target(), load_attention("sdpa"), Precision())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_attention_heads": "six"}, "num_attention_heads"),
        ({"num_attention_heads": 0}, "ZeroDivisionError"),
        ({"hidden_size": None}, "hidden_size"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps"),
        ({"rope_parameters": {"rope_type": "brand-new", "rope_theta": 1e4}}, "brand-new"),
        ({"draft_vocab_size": "many"}, "many"),
        ({"target_hidden_size": [1]}, "TypeError"),
        ({"eagle_config": 3}, "AttributeError"),
        ({"eagle_aux_hidden_state_layer_ids": 5}, "TypeError"),
    ],
)
def test_wrong_types_in_the_config_of_a_layer(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=words) as caught:
        load_eagle(tmp_path, safeailab3(**{**({} if "eagle" in str(changes) else AUX), **changes}), eagle3_tensors())
    assert str(tmp_path) in str(caught.value)


def without(tensors: Tensors, *keys: str) -> Tensors:
    return {key: tensor for key, tensor in tensors.items() if key not in keys}


REFUSED: dict[str, tuple[dict[str, Any], Tensors, str]] = {
    "missing": (
        safeailab3(**AUX), without(eagle3_tensors(), "midlayer.mlp.up_proj.weight"),
        r"tensor layers\.0\.mlp\.up_proj\.weight \[80, 48\] is missing",
    ),
    "fc of two features": (safeailab3(**AUX), eagle3_tensors(features=2), r"fc\.weight is \[48, 96\], \[48, 144\] is"),
    "unknown": (safeailab3(**AUX), eagle3_tensors(extra=NORMS), r"unknown tensors fc_norm\.0\.weight"),
    "no input norm": (
        library3(norm_before_fc=True, **AUX), eagle3_tensors("layers.0"), r"input_norm\.weight \[144\] is missing"
    ),
    "no fc norm": (library3(fc_norm=True, **AUX), eagle3_tensors("layers.0"), r"fc_norm\.0\.weight \[48\] is missing"),
    "both norms": (
        library3(norm_before_fc=True, fc_norm=True, **AUX), eagle3_tensors("layers.0", extra=NORMS | INPUT_NORM),
        "exclude each other",
    ),
    "half a bias": (
        safeailab3(**AUX), eagle3_tensors(extra={"midlayer.self_attn.q_proj.bias": torch.zeros(48)}),
        r"k_proj\.bias \[16\] is missing",
    ),
    "reduced without d2t": (
        safeailab3(draft_vocab_size=100, **AUX), without(eagle3_tensors(draft_vocab=100), "d2t"), r"tensor d2t \[100\]"
    ),
    "reduced without head": (
        safeailab3(draft_vocab_size=100, **AUX), without(eagle3_tensors(draft_vocab=100), "lm_head.weight"),
        r"tensor lm_head\.weight \[100, 48\] is missing",
    ),
    "d2t as ids": (
        safeailab3(draft_vocab_size=100, **AUX), eagle3_tensors(draft_vocab=100) | {"d2t": torch.arange(220, 320)},
        "d2t does not give distinct ids below 320",
    ),
    "t2d of another vocabulary": (
        safeailab3(draft_vocab_size=100, **AUX),
        eagle3_tensors(draft_vocab=100) | {"t2d": torch.arange(VOCAB) < 100}, "d2t and t2d contradict each other",
    ),
    "layers of a deeper target": (
        safeailab3(eagle_aux_hidden_state_layer_ids=[2, 16, 29]), eagle3_tensors(), r"\[2, 16, 29\] are not distinct"
    ),
    "a wider target": (
        safeailab3(target_hidden_size=64, **AUX), eagle3_tensors(feature_size=64),
        "target_hidden_size is 64, but the target's hidden size is 48",
    ),
    "narrow without embeddings": (
        safeailab3(hidden_size=24, target_hidden_size=HIDDEN, head_dim=8, **AUX),
        eagle3_tensors(hidden=24, head_dim=8, embed=False), r"embed_tokens\.weight is missing, and the target's has",
    ),
    "another algorithm": ({**library3(), "speculators_model_type": "dflash"}, eagle3_tensors(), "'dflash' is not supp"),
    "another layer": (library3({"model_type": "gpt2"}, **AUX), eagle3_tensors("layers.0"), "of model_type 'gpt2'"),
    "layernorms": ({**library3(layernorms=True), "speculators_model_type": "eagle"}, eagle1_tensors(), "layernorms"),
    "sliding window": (
        library3({"model_type": "qwen3", "layer_types": ["sliding_attention"], "head_dim": 16}, **AUX),
        eagle3_tensors("layers.0", head_dim=16), "sliding window",
    ),
    "rope by length": (
        safeailab3(rope_scaling={"rope_type": "dynamic", "factor": 2.0}, **AUX), eagle3_tensors(), "depends on the len"
    ),
    "eagle1 for another target": (
        {**LAYER, "hidden_size": 96}, eagle1_tensors(), "hidden_size is 96, but the target's is 48"
    ),
    "eagle1 with a bias to come": (
        {**LAYER, "bias": True}, eagle1_tensors(bias=False), r"tensor fc\.bias \[48\] is missing"
    ),
    "eagle1 with a bias to come, by SafeAILab's default": (
        LAYER, eagle1_tensors(bias=False), r"tensor fc\.bias \[48\] is missing"
    ),
    "the library's eagle1 with a bias to come": (
        {"speculators_model_type": "eagle", "transformer_layer_config": LAYER, "fusion_bias": True},
        eagle1_tensors(bias=False), r"tensor fc\.bias \[48\] is missing"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_draft_layers_that_do_not_fit(name: str, tmp_path: Path) -> None:
    config, tensors, message = REFUSED[name]
    with pytest.raises(UnsupportedModel, match=message):
        load_eagle(tmp_path, config, tensors, tiny_target())


def test_the_library_s_eagle1_layout(tmp_path: Path) -> None:
    """fusion_fc and transformer are other names of the same tensors; there is no bias unless the config says so."""
    plain = {"speculators_model_type": "eagle", "transformer_layer_config": LAYER}
    assert load_eagle(tmp_path / "plain", plain, eagle1_tensors(bias=False), tiny_target()).config.version == 1
    ours = eagle1_tensors()
    renamed = {
        key.replace("fc.", "fusion_fc.").replace("layers.0.", "transformer."): tensor for key, tensor in ours.items()
    }
    config = {"speculators_model_type": "eagle", "transformer_layer_config": LAYER, "fusion_bias": True}
    target = tiny_target()
    one, two = load_eagle(tmp_path / "a", LAYER, ours, target), load_eagle(tmp_path / "b", config, renamed, target)
    assert one.config.version == two.config.version == 1
    features = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(0))
    outputs = []
    for model in (one, two):
        runner = Run(model)
        seq = runner.open(0, [3, 5, 7, 11, 13])
        outputs.append(runner.entries([Feed(seq, 0, 4)], {seq: features})[0])
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=0)


def test_a_target_that_cannot_lend_is_named(tmp_path: Path) -> None:
    """The scripted model has hidden states, but no matrices."""
    config = {
        **LAYER,
        "hidden_size": 8,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "bias": False,
    }
    tensors = {key: torch.zeros(shape) for key, shape in {
        "fc.weight": (8, 16), "layers.0.self_attn.q_proj.weight": (8, 8), "layers.0.self_attn.k_proj.weight": (8, 8),
        "layers.0.self_attn.v_proj.weight": (8, 8), "layers.0.self_attn.o_proj.weight": (8, 8),
        "layers.0.mlp.gate_proj.weight": (80, 8), "layers.0.mlp.up_proj.weight": (80, 8),
        "layers.0.mlp.down_proj.weight": (8, 80), "layers.0.post_attention_layernorm.weight": (8,),
    }.items()}  # fmt: skip
    draft = write_eagle(tmp_path, config, tensors)
    with pytest.raises(UnsupportedModel, match=r"embed_tokens\.weight is missing, and ScriptedExecutor cannot lend"):
        scripted_engine(speculation=SpeculationConfig(method="eagle", draft=draft))
