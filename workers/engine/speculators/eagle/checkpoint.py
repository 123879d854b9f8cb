"""EAGLE draft layers on disk: SafeAILab's layout and that of the `speculators` library, with their variants.

EAGLE-1 (arXiv 2401.15077) predicts the next feature from the feature of a token and the token after it. EAGLE-3 (arXiv
2503.01840) reads several layers of the target, is not held to predict features, and may have a vocabulary of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig

from workers.engine.api.errors import UnsupportedModel
from workers.engine.models.loading.refusals import refusing
from workers.engine.speculators.shared.checkpoint import DraftFiles, Tensors, open_draft
from workers.engine.state.kv_cache import FINAL, CacheShape

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
LAYERS = ("llama", "mistral", "qwen2", "qwen3")
"""model_type of draft layers that are built like a Llama's."""
UNUSED = (
    "verifier_norm.weight", "verifier_lm_head.weight", "rotary_emb.inv_freq", "layers.0.self_attn.rotary_emb.inv_freq",
)  # fmt: skip
"""Tensors for training alone, and tables that the config determines."""


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """What a draft layer computes."""

    version: int
    """1, or 3."""
    layer: Any
    """transformers config of the decoder layer."""
    feature_layers: tuple[int, ...]
    """Layers of the target whose hidden states are read, in the order in which they are joined."""
    feature_size: int
    """Width of the target's hidden states."""
    draft_vocab: int
    target_vocab: int
    head_norms: bool
    """Qwen3: queries and keys are normalised."""
    fc_bias: bool
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    @property
    def hidden_size(self) -> int:
        return int(self.layer.hidden_size)

    @property
    def num_layers(self) -> int:
        return int(self.layer.num_hidden_layers)

    def cache_shape(self, dtype: torch.dtype, device: torch.device) -> CacheShape:
        layer = self.layer
        return CacheShape.uniform(self.num_layers, layer.num_key_value_heads, head_dim(layer), dtype, device)


def head_dim(layer: Any) -> int:
    return int(getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads)


def open_eagle(name: str, target: CacheShape, target_vocab: int) -> tuple[EagleConfig, Tensors]:
    """Read config and tensors. Raises `ModelNotFound` or `UnsupportedModel`, saying what does not fit."""
    files = open_draft(name)
    tensors = files.tensors(WEIGHTS)
    for published, ours in (("midlayer.", "layers.0."), ("transformer.", "layers.0."), ("fusion_fc.", "fc.")):
        tensors.rename(published, ours)
    with refusing(f"{name}/config.json"):
        return _parse(files, tensors, target, target_vocab), tensors


def _parse(files: DraftFiles, tensors: Tensors, target: CacheShape, target_vocab: int) -> EagleConfig:
    raw = files.config
    kind = raw.get("speculators_model_type")
    if kind not in (None, "eagle", "eagle3"):
        _refuse(files, f"speculators_model_type {kind!r} is not supported; eagle and eagle3 are")
    if raw.get("layernorms"):
        _refuse(files, "layernorms is true: which of its outputs are fed back is not defined by the layout")
    version = 3 if kind == "eagle3" or (kind is None and "layers.0.hidden_norm.weight" in tensors) else 1
    layer = _layer_config(files, raw.get("transformer_layer_config") or raw)
    feature_size = int(raw.get("target_hidden_size") or target.hidden_size)
    if feature_size != target.hidden_size:
        _refuse(files, f"target_hidden_size is {feature_size}, but the target's hidden size is {target.hidden_size}")
    if version == 1 and layer.hidden_size != feature_size:
        _refuse(files, f"hidden_size is {layer.hidden_size}, but the target's is {feature_size}")
    config = EagleConfig(
        version=version,
        layer=layer,
        feature_layers=_feature_layers(files, target.num_layers) if version == 3 else (FINAL,),
        feature_size=feature_size,
        draft_vocab=int(raw.get("draft_vocab_size") or target_vocab) if version == 3 else target_vocab,
        target_vocab=target_vocab,
        head_norms=kind is not None and layer.model_type == "qwen3",
        fc_bias=version == 1 and _fc_bias(raw),
        **{name: version == 3 and bool(raw.get(name)) for name in VARIANTS},
    )
    if config.norm_before_fc and config.fc_norm:
        _refuse(files, "norm_before_fc and fc_norm exclude each other")
    return config


def _fc_bias(raw: Mapping[str, Any]) -> bool:
    """SafeAILab's layers have a bias unless their config denies it; the library's only if theirs says so."""
    return bool(raw.get("fusion_bias") if "speculators_model_type" in raw else raw.get("bias", True))


VARIANTS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def _layer_config(files: DraftFiles, raw: Mapping[str, Any]) -> Any:
    kind = raw.get("model_type") or "llama"
    if kind not in LAYERS:
        _refuse(files, f"has a draft layer of model_type {kind!r}; supported: {', '.join(LAYERS)}")
    try:
        layer = AutoConfig.for_model(kind, **{key: value for key, value in raw.items() if key != "model_type"})
    except (TypeError, ValueError) as error:
        _refuse(files, str(error))
    if getattr(layer, "num_hidden_layers", 1) < 1:
        _refuse(files, "num_hidden_layers is less than 1")
    if "sliding_attention" in (getattr(layer, "layer_types", None) or ()):
        _refuse(files, "its layer attends through a sliding window")
    rope = layer.rope_parameters
    if rope.get("rope_type", "default") in ("dynamic", "longrope") or rope.get("partial_rotary_factor", 1.0) != 1.0:
        _refuse(files, f"rotary embedding {rope} depends on the length, or rotates a part of each head")
    if layer.hidden_act != "silu":
        _refuse(files, f"hidden_act is {layer.hidden_act!r}, not 'silu'")
    return layer


def _feature_layers(files: DraftFiles, num_layers: int) -> tuple[int, ...]:
    """Ids name the residual stream that *enters* a layer. Default: early, middle and late, as in the paper."""
    nested = files.config.get("eagle_config") or {}
    given = files.config.get("eagle_aux_hidden_state_layer_ids") or nested.get("eagle_aux_hidden_state_layer_ids")
    layers = tuple(int(layer) for layer in given or (2, num_layers // 2, num_layers - 3))
    if min(layers) < 0 or max(layers) >= num_layers or len(set(layers)) != len(layers):
        _refuse(files, f"auxiliary layers {list(layers)} are not distinct ones of the target's {num_layers}")
    return layers


def target_ids(tensors: Tensors, config: EagleConfig) -> torch.Tensor | None:
    """[draft_vocab] int64: the target's id of each id of the draft; None where they are the same.

    On disk d2t holds offsets, target id = draft id + d2t[draft id], and t2d says which of the target's ids there are.
    """
    ids = torch.arange(config.draft_vocab)
    if config.draft_vocab == config.target_vocab and "d2t" not in tensors:
        tensors.find("t2d", config.target_vocab)
        return None
    ids += tensors.take("d2t", config.draft_vocab).long()
    if len(set(ids.tolist())) != len(ids) or not 0 <= int(ids.min()) <= int(ids.max()) < config.target_vocab:
        raise UnsupportedModel(f"{tensors.name}: d2t does not give distinct ids below {config.target_vocab}")
    known = tensors.find("t2d", config.target_vocab)
    if known is not None and (int(known.bool().sum()) != len(ids) or not bool(known.bool()[ids].all())):
        raise UnsupportedModel(f"{tensors.name}: d2t and t2d contradict each other")
    return ids


def _refuse(files: DraftFiles, reason: str) -> Any:
    raise UnsupportedModel(f"{files.name}: {reason}")
