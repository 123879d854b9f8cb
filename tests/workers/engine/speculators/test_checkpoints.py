"""Files that do not fit are refused by name, before anything runs; files that were written load again."""

from __future__ import annotations

import json
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.drafts.cores import medusa_core
from tests.support.drafts.eagle_runs import AUX, FEATURES, INPUT_NORM, NORMS, Run
from tests.support.drafts.weights import (
    HIDDEN,
    LAYER,
    eagle1_tensors,
    eagle3_tensors,
    library3,
    random_heads,
    safeailab3,
    tiny_target,
    write_eagle,
    write_heads,
)
from tests.support.engine.runs import engine as scripted_engine
from tests.support.engine.runs import run
from tests.support.models.tiny import VOCAB
from workers.engine import EngineCore, Request, SamplingParams, SpeculationConfig
from workers.engine.api.errors import InvalidConfig, ModelNotFound, UnsupportedModel
from workers.engine.attention.interface import load_attention
from workers.engine.models.layers.precision import Precision
from workers.engine.speculators.eagle.checkpoint import open_eagle
from workers.engine.speculators.eagle.layer import EagleModel, build_eagle
from workers.engine.speculators.medusa.heads import MedusaHeads, save_heads
from workers.engine.speculators.medusa.tree import calibrate_tree, write_tree
from workers.engine.speculators.shared.checkpoint import open_draft
from workers.engine.state.batch import Feed
from workers.engine.state.sequence import Sequence
from workers.engine.state.tree import DraftTree

Tensors = dict[str, torch.Tensor]
LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


def load_heads(directory: Path) -> MedusaHeads:
    return MedusaHeads.load(open_draft(str(directory)), HIDDEN, VOCAB, Precision())


def load_eagle(directory: Path, config: dict[str, Any], tensors: Tensors, target: Any = None) -> EagleModel:
    parsed, found = open_eagle(write_eagle(directory, config, tensors), FEATURES, VOCAB)
    return build_eagle(parsed, found, target or tiny_target(), load_attention("sdpa"), Precision())


# Medusa --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pickled", [False, True])
def test_heads_survive_the_file(pickled: bool, tmp_path: Path) -> None:
    tensors = random_heads(3, 2)
    save_heads(tmp_path, tensors, num_blocks=2, base_model="org/base")
    if pickled:
        (tmp_path / "medusa_lm_head.safetensors").unlink()
        torch.save(tensors, tmp_path / "medusa_lm_head.pt")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config == {"medusa_num_heads": 3, "medusa_num_layers": 2, "base_model_name_or_path": "org/base"}
    hidden = torch.eye(HIDDEN)
    heads = load_heads(tmp_path)
    assert len(heads) == 3
    again = tmp_path / "again"
    save_heads(again, tensors, num_blocks=2, base_model="org/base")
    for head in range(3):
        torch.testing.assert_close(heads.logits(head, hidden), load_heads(again).logits(head, hidden), rtol=0, atol=0)


def test_published_configs_name_fewer_heads_than_there_are(tmp_path: Path) -> None:
    write_heads(tmp_path, random_heads(5))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "medusa_num_heads": 2}))
    assert len(load_heads(tmp_path)) == 5


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: t.pop("1.0.linear.bias"), r"tensor 1\.0\.linear\.bias \[48\] is missing"),
        (lambda t: t.update({"0.1.weight": torch.zeros(9, 48)}), r"0\.1\.weight is \[9, 48\], \[320, 48\] is needed"),
        (lambda t: t.update({"extra": torch.zeros(1)}), "unknown tensors extra"),
    ],
)
def test_heads_that_do_not_fit(spoil: Callable[[Tensors], Any], message: str, tmp_path: Path) -> None:
    tensors = random_heads(2)
    spoil(tensors)
    write_heads(tmp_path, tensors)
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 2, "medusa_num_layers": 1}')
    with pytest.raises(UnsupportedModel, match=message):
        load_heads(tmp_path)


def test_pickles_are_not_executed(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "exploded",)

    (tmp_path / "config.json").write_text('{"medusa_num_heads": 1, "medusa_num_layers": 1}')
    torch.save({"0.0.linear.weight": Bomb()}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(UnsupportedModel, match="cannot be read as a file of tensors alone"):
        load_heads(tmp_path)
    assert not (tmp_path / "exploded").exists()


def test_drafts_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no such directory"):
        open_draft(str(tmp_path / "nowhere"))
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 1, "medusa_num_layers": 1}')
    with pytest.raises(ModelNotFound, match=r"none of medusa_lm_head\.safetensors, medusa_lm_head\.pt"):
        load_heads(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "medusa_lm_head.safetensors").write_bytes(b"not a safetensors file")
    with pytest.raises(UnsupportedModel, match="cannot be read"):
        load_heads(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("[]", "config.json: holds list, not keys and values"),
        ("{", "config.json: "),
        ('{"medusa_num_heads": "x", "medusa_num_layers": 1}', "medusa_num_heads is 'x', no count"),
        ('{"medusa_num_heads": 2, "medusa_num_layers": -1}', "medusa_num_layers is -1, no count"),
        ('{"medusa_num_layers": 1}', "medusa_num_heads is missing"),
        (LFS_POINTER, "config.json: a git-lfs pointer"),
    ],
)
def test_configs_of_heads_that_are_none(config: str, message: str, tmp_path: Path) -> None:
    write_heads(tmp_path, random_heads(2))
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(UnsupportedModel, match=message):
        load_heads(tmp_path)


def test_heads_that_were_not_fetched(tmp_path: Path) -> None:
    write_heads(tmp_path, random_heads(2))
    (tmp_path / "medusa_lm_head.safetensors").write_text(LFS_POINTER)
    with pytest.raises(UnsupportedModel, match=r"medusa_lm_head\.safetensors: a git-lfs pointer"):
        load_heads(tmp_path)


# EAGLE ---------------------------------------------------------------------------------------------------------------


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


# Depth ---------------------------------------------------------------------------------------------------------------


def paths_of(depth: int) -> tuple[tuple[int, ...], ...]:
    return tuple((0,) * level for level in range(1, depth + 1))


def deepest(core: EngineCore) -> int:
    """Depth of the deepest tree that an answer was drafted with."""
    depths: list[int] = []
    propose = core.speculator.propose

    def watched(seqs: Seq[Sequence], lengths: Seq[int]) -> list[DraftTree]:
        trees = propose(seqs, lengths)
        depths.extend(max(tree.depths(), default=0) for tree in trees)
        return trees

    core.speculator.propose = watched  # type: ignore[method-assign]
    run(core, [Request(0, [5, 6, 7], SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True))])
    return max(depths)


@pytest.mark.parametrize(
    ("heads", "options", "depth"),
    [
        (2, {}, 2),
        (5, {}, 5),
        (5, {"tree_width": 1}, 5),
        (5, {"tree_width": 2, "verify": "rejection"}, 5),
        (5, {"max_draft_tokens": 3}, 3),
        (5, {"tree_paths": paths_of(5)}, 5),
        (5, {"tree_paths": paths_of(2)}, 2),
        (5, {"row_methods": ("self",), "exit_layer": 1}, 5),
    ],
    ids=str,
)
def test_drafts_are_as_deep_as_the_heads_unless_the_options_say_otherwise(
    heads: int, options: dict[str, Any], depth: int, tmp_path: Path
) -> None:
    core = medusa_core(heads, tmp_path, **options)
    assert core.report()["speculator"]["max_draft_tokens"] == depth
    assert deepest(core) == depth


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_draft_tokens": 3}, "max_draft_tokens is 3, but .* has 2 heads, one for each token: take 2 or less"),
        ({"tree_paths": paths_of(3)}, "tree_paths is 3 tokens deep, but .* has 2 heads"),
    ],
    ids=str,
)
def test_more_tokens_than_heads_are_refused_to_those_who_ask_for_them(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidConfig, match=message):
        medusa_core(2, tmp_path, **options)


@pytest.mark.parametrize(("options", "depth"), [({}, 5), ({"max_draft_tokens": 2}, 2), ({"tree_width": 1}, 6)])
def test_a_calibrated_tree_is_drafted_whole(options: dict[str, Any], depth: int, tmp_path: Path) -> None:
    write_tree(tmp_path, calibrate_tree([[(0,) * 5]], 9))
    assert deepest(medusa_core(6, tmp_path, **options)) == depth


def test_a_calibrated_tree_of_more_heads_is_refused(tmp_path: Path) -> None:
    write_tree(tmp_path, calibrate_tree([[(0, 0, 0)]], 9))
    with pytest.raises(UnsupportedModel, match=r"medusa_tree\.json: the tree is 3 tokens deep, but there are 2 heads"):
        medusa_core(2, tmp_path)


# Options -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "medusa"}, "method medusa needs a draft"),
        ({"method": "ngram", "draft": "d"}, "only draft_model, medusa, eagle take a draft"),
        ({"method": "eagle", "draft": "d", "row_methods": ("medusa",)}, "eagle and medusa would share one draft"),
        ({"method": "ngram", "tree_nodes": 5}, "drafts of method ngram are chains"),
        ({"method": "eagle", "draft": "d", "tree_width": 17}, "tree_width must be 1 to 16"),
        ({"method": "eagle", "draft": "d", "tree_nodes": 0}, "tree_nodes must be 1 to 256"),
        ({"method": "eagle", "draft": "d", "tree_width": 1, "tree_nodes": 9}, "no effect on a chain"),
        ({"method": "eagle", "draft": "d", "tree_width": 2, "tree_paths": ((0,),)}, "drop tree_width and tree_nodes"),
        ({"method": "eagle", "draft": "d", "tree_paths": ((0, 0),)}, "has no parent"),
        ({"method": "eagle", "draft": "d", "tree_paths": [0, 1]}, "must be a list of lists"),
        ({"method": "eagle", "draft": "d", "tree_paths": [["a"]]}, "must be a list of lists"),
        ({"method": "eagle", "draft": "d", "tree_paths": ((0,), (0, 0)), "max_draft_tokens": 1}, "2 tokens deep"),
        (
            {
                "method": "self",
                "exit_layer": 1,
                "tree_paths": tuple((0,) * n for n in range(1, 6)),
                "max_draft_tokens": 4,
            },
            "5 tokens deep",
        ),
        ({"method": "eagle", "draft": "d", "tree_nodes": 9, "verify": "rejection"}, "cannot take a dynamic tree"),
        ({"method": "eagle", "draft": "d", "tree_paths": ((0,),), "verify": "block"}, "takes chains, not trees"),
    ],
)
def test_options_that_contradict_each_other(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        SpeculationConfig(**options)


def test_what_grows_where_nothing_is_set() -> None:
    def shape(**options: Any) -> tuple[int, int | None]:
        found = SpeculationConfig(draft="d", **options).tree_shape
        return found.width, found.nodes

    assert shape(method="draft_model") == (1, None)
    assert shape(method="eagle") == shape(method="medusa") == (4, 16)
    assert shape(method="eagle", tree_width=1) == (1, None)
    assert shape(method="eagle", tree_width=3) == (3, None)
    assert shape(method="draft_model", tree_nodes=9) == (4, 9)
    assert shape(method="eagle", verify="rejection") == shape(method="eagle", verify="block") == (1, None)
