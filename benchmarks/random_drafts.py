"""Medusa heads and an EAGLE-3 layer with random weights for the demo model: what they propose must not matter."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from workers.engine.models.loading.gguf_copy import converted
from workers.engine.models.loading.sources import resolve
from workers.engine.speculators.medusa.heads import save_heads, untrained_heads

HEADS = 3


def write_medusa(folder: Path, target: str) -> str:
    """Untrained heads, which all say what the target's own head says."""
    heads = untrained_heads(_embedding(target), HEADS)
    save_heads(folder / "medusa", heads, num_blocks=1, base_model=target)
    return str(folder / "medusa")


def write_eagle(folder: Path, target: str) -> str:
    """A random layer that shares the target's embedding and head."""
    config = json.loads((converted(resolve(target)).path / "config.json").read_text())
    hidden, heads, width = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    shapes = {
        "fc": (hidden, 3 * hidden),
        "midlayer.self_attn.q_proj": (heads * width, 2 * hidden),
        "midlayer.self_attn.k_proj": (config["num_key_value_heads"] * width, 2 * hidden),
        "midlayer.self_attn.v_proj": (config["num_key_value_heads"] * width, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, heads * width),
        "midlayer.mlp.gate_proj": (config["intermediate_size"], hidden),
        "midlayer.mlp.up_proj": (config["intermediate_size"], hidden),
        "midlayer.mlp.down_proj": (hidden, config["intermediate_size"]),
    }
    generator = torch.Generator().manual_seed(0)
    tensors = {f"{name}.weight": torch.randn(shape, generator=generator) * 0.02 for name, shape in shapes.items()}
    for norm in ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm"):
        tensors[f"{norm}.weight"] = torch.ones(hidden)
    tensors["lm_head.weight"] = _embedding(target)
    directory = folder / "eagle"
    directory.mkdir(parents=True, exist_ok=True)
    layer = {**config, "num_hidden_layers": 1, "draft_vocab_size": config["vocab_size"], "tie_word_embeddings": False}
    (directory / "config.json").write_text(json.dumps(layer))
    save_file(tensors, directory / "model.safetensors")
    return str(directory)


def _embedding(target: str) -> torch.Tensor:
    with safe_open(converted(resolve(target)).path / "model.safetensors", framework="pt") as weights:
        table: torch.Tensor = weights.get_tensor("model.embed_tokens.weight")
    return table
