"""What a model must be like for packed execution, checked by name at load.

`check_config` and `check_length` read the config alone, before any weights load. `probe` then runs a few tokens through
the loaded model and looks at everything it hands to its attention function: a feature that no config field gives away
shows there.
`confirm` compares the executor built on it with transformers' own forward pass.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from workers.engine.api.errors import InvalidConfig, UnsupportedModel
from workers.engine.models.executors.fused import FusedExecutor
from workers.engine.models.executors.hf import HuggingFaceExecutor, carrying
from workers.engine.models.executors.rewired import can_ask, use_own_attention, use_packed_attention
from workers.engine.models.shapes import effective_window, longest_window, windows
from workers.engine.models.trial import Trial
from workers.engine.state.kv_cache import CacheShape, LayerShape

PROBE_TOKENS = 8
HONOURED = {"sliding_window", "softcap", "slopes", "s_aux"}
"""What `hf.weighing_of` makes of a model's extra arguments."""
HARMLESS = {
    "cache", "cache_position", "dropout", "is_causal", "output_attentions", "output_hidden_states",
    "output_router_logits", "position_embeddings", "position_ids", "return_dict", "use_cache",
    *HONOURED,
}  # fmt: skip
SUPPORTED_LAYERS = {"full_attention", "attention", "sliding_attention"}
HALF_TOLERANCE = 0.1
QUANTISED_TOLERANCE = 0.5
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
"""Norm of the difference of the logits, relative to the norm of the logits."""


def context_limit(config: Any, name: str, requested: int | None, bound: int | None = None) -> int:
    """Tokens that a sequence may have: as many as are asked for, or as the model has positions, but at most `bound`.

    Raises `InvalidConfig` when more are asked for than there are positions, and when nothing says how many.
    """
    limit: int | None = getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)
    if limit is not None and requested is not None and requested > limit:
        raise InvalidConfig(f"max_model_len is {requested}, but {name} has {limit} positions")
    known = [length for length in (requested or limit, bound) if length is not None]
    if not known:
        raise InvalidConfig(f"{name}: the model's config gives no context length; set max_model_len")
    return min(known)


def check_config(config: Any, model_class: Any, name: str) -> None:
    """Raise `UnsupportedModel`, naming the model and the reason, for what packed attention never honours."""
    if config.is_encoder_decoder:
        _refuse(name, config, "is an encoder-decoder model; only decoders can run")
    if getattr(config, "kv_lora_rank", None):
        _refuse(name, config, "has multi-head latent attention (MLA), which is not supported")
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    unknown = ", ".join(sorted(set(kinds) - SUPPORTED_LAYERS))
    if unknown:
        what = "is a hybrid with" if set(kinds) & SUPPORTED_LAYERS else "has"
        _refuse(name, config, f"{what} layers of kind {unknown}; only full and sliding attention is supported")
    if not can_ask(model_class):
        _refuse(name, config, "does not take its attention from transformers' AttentionInterface")


def check_length(config: Any, name: str, max_model_len: int) -> None:
    """Raise `UnsupportedModel` for what is not honoured with sequences as long as that, and say what would be.

    Of a model that `check_config` has let in: to advise a shorter context is the last word, not the first of several.
    """
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk is not None and chunk < max_model_len:
        _refuse(name, config, f"attends in chunks of {chunk} tokens: set max_model_len to {chunk} or less")
    rope = getattr(config, "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings")
    if rope.get("rope_type") == "longrope" and original and max_model_len > original:
        reason = f"turns all its rotary angles once a batch holds more than {original} positions"
        _refuse(name, config, f"{reason}: set max_model_len to {original} or less")


@dataclass(frozen=True, slots=True)
class Probe:
    """What a short forward pass of the untouched model showed."""

    shape: CacheShape
    """The cache that the model needs."""
    tokens: list[int]
    expected: torch.Tensor
    """[tokens, V] float32 logits under transformers' own attention."""


@torch.inference_mode()
def probe(model: Any, name: str, max_model_len: int) -> Probe:
    """Look at the model in a short forward pass. Leaves it set to our attention.

    Raises `UnsupportedModel` for what packed attention does not honour.
    """
    config = model.config
    # Ordinary tokens: a run of special ones drives bfloat16 models into chaos.
    tokens = torch.arange(1, PROBE_TOKENS + 1, device=model.device)[None] * 7919 % config.vocab_size
    use_own_attention(model)
    expected = model(input_ids=tokens, use_cache=False).logits[0].float()
    return Probe(_record(model, tokens, name, max_model_len), tokens[0].tolist(), expected)


@torch.inference_mode()
def foresee(skeleton: Any, name: str, max_model_len: int) -> None:
    """Raise what `probe` would raise of the model once it is loaded, as far as one without weights shows it.

    skeleton: on the meta device, where everything has a shape and nothing a value. A model whose path depends on values
    (which experts, how long a rotary table) is followed up to there.
    """
    # What needs a value says so by a `NotImplementedError` or a plain `RuntimeError`.
    with suppress(RuntimeError):
        _record(skeleton, torch.zeros(1, PROBE_TOKENS, dtype=torch.long, device="meta"), name, max_model_len)


def _record(model: Any, tokens: torch.Tensor, name: str, max_model_len: int) -> CacheShape:
    """Run tokens [1, T] through our attention, as a recorder of what it is asked for."""
    count = tokens.shape[1]
    use_packed_attention(model)
    # Where a model's code makes no sliding mask, the window that it hands on is none of its own attention's.
    slides = hasattr(sys.modules[type(model).__module__], "create_sliding_window_causal_mask")
    recorder = _Recorder(name, model.config, max_model_len, slides=slides)
    with carrying(recorder):
        model(
            input_ids=tokens,
            position_ids=torch.arange(count, device=tokens.device)[None],
            use_cache=False,
            logits_to_keep=torch.arange(count, device=tokens.device),
        )
    return recorder.shape(model.dtype, tokens.device)


def confirm(executor: FusedExecutor | HuggingFaceExecutor, seen: Probe, name: str) -> None:
    """Raise `UnsupportedModel` if the executor's logits are not those of the untouched model."""
    precision = executor.precision
    tolerance = TOLERANCE.get(precision.dtype, HALF_TOLERANCE) if precision.is_whole else QUANTISED_TOLERANCE
    logits = Trial(executor).chain(seen.tokens).float()
    difference = (logits - seen.expected).norm() / seen.expected.norm()
    if not difference <= tolerance:
        raise UnsupportedModel(f"{name} gives other logits when packed (relative difference {difference:.1e})")


class _Recorder:
    """`LayerAttention` of one causal sequence, without a cache."""

    def __init__(self, name: str, config: Any, max_model_len: int, *, slides: bool) -> None:
        self._name, self._config, self._max_model_len = name, config, max_model_len
        self._slides = slides
        self._layers: dict[int, LayerShape] = {}
        self._windows: dict[int, int | None] = {}

    def layer(
        self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, extra: dict[str, Any]
    ) -> torch.Tensor:
        self._check(module, q, k, v, extra)
        if q.shape[2] != k.shape[2] or q.shape[1] % k.shape[1]:
            self._refuse(f"has queries of shape {tuple(q.shape[1:])} on keys of shape {tuple(k.shape[1:])}")
        self._layers[module.layer_idx] = LayerShape(int(k.shape[1]), int(k.shape[2]))
        self._windows[module.layer_idx] = effective_window(extra.get("sliding_window"), self._max_model_len)
        query, key, value = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
        out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1).contiguous()

    def shape(self, dtype: torch.dtype, device: torch.device) -> CacheShape:
        count = self._config.num_hidden_layers
        if sorted(self._layers) != list(range(count)):
            self._refuse(f"has attention in layers {sorted(self._layers)} of {count}: other layers keep another state")
        for layer, window in enumerate(windows(self._config, self._max_model_len)):
            if window is not None and self._windows[layer] is None:
                kept = f"keeps a sliding window of {window} tokens from its attention function"
                self._refuse(f"{kept}: set max_model_len to {window} or less")
        handed = [window for window in self._windows.values() if window is not None]
        if handed and not self._slides:
            only = f"has a sliding window of {handed[0]} tokens for some of transformers' attention functions alone"
            self._refuse(f"{only}: set max_model_len to {handed[0]} or less")
        layers = tuple(self._layers[layer] for layer in range(count))
        window = longest_window([self._windows[layer] for layer in range(count)])
        return CacheShape(layers, dtype, device, self._config.hidden_size, window)

    def _check(self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, extra: dict[str, Any]) -> None:
        sinks = extra.get("s_aux")
        if sinks is not None and sinks.shape != (q.shape[1],):
            self._refuse(f"has attention sinks of shape {tuple(sinks.shape)} for {q.shape[1]} heads")
        if not getattr(module, "is_causal", True) or extra.get("is_causal") is False:
            self._refuse("attends to later tokens")
        if k.shape != v.shape:
            self._refuse(f"has keys of shape {tuple(k.shape[1:])} and values of shape {tuple(v.shape[1:])}")
        if module.layer_idx in self._layers:
            self._refuse(f"attends twice in layer {module.layer_idx}")
        for key, value in extra.items():
            if key not in HARMLESS and value is not None:
                self._refuse(f"hands {key} to its attention, which packed attention does not know")

    def _refuse(self, reason: str) -> None:
        _refuse(self._name, self._config, reason)


def _refuse(name: str, config: Any, reason: str) -> None:
    raise UnsupportedModel(f"{name} ({config.model_type}) {reason}")
