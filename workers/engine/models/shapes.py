"""The sizes of a model's KV cache, as its config gives them."""

from __future__ import annotations

from typing import Any

import torch

from workers.engine.state.kv_cache import CacheShape, LayerShape


def cache_shape(config: Any, max_model_len: int, dtype: torch.dtype, device: torch.device) -> CacheShape:
    """What the layers of a transformers config keep for sequences of up to so many tokens."""
    layers = tuple(_layer(part) for part in _layer_configs(config))
    window = longest_window(windows(config, max_model_len))
    return CacheShape(layers, dtype, device, config.hidden_size, window)


def windows(config: Any, max_model_len: int) -> list[int | None]:
    """Of each layer the positions that a row sees, its own included; None where that is the whole context."""
    window = effective_window(getattr(config, "sliding_window", None), max_model_len)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds[: config.num_hidden_layers]]


def effective_window(window: int | None, max_model_len: int) -> int | None:
    """A window as wide as the context is none."""
    return None if window is None or window >= max_model_len else int(window)


def longest_window(windows: list[int | None]) -> int | None:
    """How far back any layer looks; None where one sees all."""
    known = [window for window in windows if window is not None]
    return max(known) if known and len(known) == len(windows) else None


def _layer_configs(config: Any) -> list[Any]:
    count = config.num_hidden_layers
    return [config.per_layer_config[index] if config.is_heterogeneous else config for index in range(count)]


def _layer(config: Any) -> LayerShape:
    heads = int(config.num_attention_heads)
    kv_heads = getattr(config, "num_key_value_heads", None)
    if config.model_type == "falcon":
        alone = config.multi_query and not config.new_decoder_architecture
        kv_heads = 1 if alone else config.num_kv_heads
    return LayerShape(
        int(kv_heads or heads),
        int(getattr(config, "head_dim", None) or config.hidden_size // heads),
    )
