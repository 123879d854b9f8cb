"""A tiny Llama as target, and Medusa heads and EAGLE layers for it: random, or made so that they are often right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from tests.support.models.tiny import VOCAB, build, config_of
from workers.engine.models.executor import LoadedModel
from workers.engine.models.facts import ModelReport
from workers.engine.models.loading.pretrained import build_executor
from workers.engine.speculators.medusa.heads import save_heads, untrained_heads
from workers.engine.text.tokenizer import ByteTokenizer

HIDDEN, INNER, HEADS, KV_HEADS = 48, 80, 6, 2
LAYER = {
    "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 1,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "vocab_size": VOCAB, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip


def tiny_model(context: float = 0.1, seed: int = 0) -> LlamaForCausalLM:
    """A Llama whose next token depends mostly on the last one: `context` scales what its layers add to that.

    Rows of the embedding have mean square 1, so the final norm leaves them as they are.
    """
    model = build(config_of("Llama", rms_norm_eps=1e-6), seed=seed)
    with torch.no_grad():
        table = model.model.embed_tokens.weight
        table.div_(table.square().mean(-1, keepdim=True).sqrt())
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(context)
            layer.mlp.down_proj.weight.mul_(context)
        model.model.norm.weight.fill_(1.0)
        model.lm_head.weight.mul_(2.0)
    return model


def tiny_target(context: float = 0.1, attention: str = "numba", dtype: torch.dtype = torch.float32) -> LoadedModel:
    executor = build_executor(tiny_model(context).to(dtype), attention, "tiny", 256)
    return LoadedModel(executor, ByteTokenizer(VOCAB), "tiny", "0", ModelReport(attention=attention))


# Medusa --------------------------------------------------------------------------------------------------------------


def random_heads(num_heads: int = 4, num_blocks: int = 1, *, hidden: int = HIDDEN, vocab: int = VOCAB) -> Any:
    generator = torch.Generator().manual_seed(num_heads * 10 + num_blocks)
    tensors = untrained_heads(torch.empty(vocab, hidden), num_heads, num_blocks)
    return {key: torch.randn(tensor.shape, generator=generator) * 0.3 for key, tensor in tensors.items()}


def chained_heads(model: LlamaForCausalLM, num_heads: int = 4) -> dict[str, torch.Tensor]:
    """Heads that follow the target's most likely tokens: fitted by least squares on where each token leads."""
    with torch.no_grad():
        table, lm_head = model.model.embed_tokens.weight, model.lm_head.weight
        follows = (table @ lm_head.T).argmax(-1)
        tensors = untrained_heads(lm_head, num_heads)
        last = follows
        for head in range(num_heads):
            last = follows[last]
            wanted = lm_head.new_zeros(len(table), len(table)).scatter_(1, last[:, None], 12.0)
            ridge = table.T @ table + 0.1 * torch.eye(HIDDEN)
            tensors[f"{head}.1.weight"] = (torch.linalg.solve(ridge, table.T @ wanted)).T.contiguous()
    return tensors


def write_heads(directory: Path, tensors: dict[str, torch.Tensor], num_blocks: int = 1) -> str:
    save_heads(directory, tensors, num_blocks=num_blocks, base_model="tiny")
    return str(directory)


# EAGLE ---------------------------------------------------------------------------------------------------------------


def layer_tensors(
    name: str = "layers.0", *, entry: int = HIDDEN, norms: tuple[str, ...] = ("post_attention_layernorm",),
    scale: float = 0.15, hidden: int = HIDDEN, head_dim: int = HIDDEN // HEADS, seed: int = 1,
) -> dict[str, torch.Tensor]:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "self_attn.q_proj": (HEADS * head_dim, entry), "self_attn.k_proj": (KV_HEADS * head_dim, entry),
        "self_attn.v_proj": (KV_HEADS * head_dim, entry), "self_attn.o_proj": (hidden, HEADS * head_dim),
        "mlp.gate_proj": (INNER, hidden), "mlp.up_proj": (INNER, hidden), "mlp.down_proj": (hidden, INNER),
    }  # fmt: skip
    tensors = {
        f"{name}.{part}.weight": torch.randn(shape, generator=generator) * scale for part, shape in shapes.items()
    }
    for norm in norms:
        tensors[f"{name}.{norm}.weight"] = 1 + 0.3 * torch.randn(hidden, generator=generator)
    return tensors


def eagle1_tensors(*, bias: bool = True, near: float | None = None) -> dict[str, torch.Tensor]:
    """Random ones; with `near` the layer passes the embedding on but for noise of that size, as the target does."""
    generator = torch.Generator().manual_seed(2)
    tensors = layer_tensors(scale=0.15 if near is None else near)
    tensors["fc.weight"] = torch.randn((HIDDEN, 2 * HIDDEN), generator=generator) * (0.1 if near is None else near)
    if near is not None:
        tensors["fc.weight"][:, :HIDDEN] += torch.eye(HIDDEN)
    if bias:
        tensors["fc.bias"] = torch.randn(HIDDEN, generator=generator) * (0.1 if near is None else near)
    return tensors


def eagle3_tensors(
    prefix: str = "midlayer", *, draft_vocab: int = VOCAB, features: int = 3, embed: bool = True, lm_head: bool = True,
    extra: Any = None, hidden: int = HIDDEN, feature_size: int = HIDDEN, head_dim: int = HIDDEN // HEADS,
    target_vocab: int = VOCAB,
) -> dict[str, torch.Tensor]:  # fmt: skip
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int, scale: float = 0.3) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    tensors = layer_tensors(prefix, entry=2 * hidden, norms=norms, hidden=hidden, head_dim=head_dim)
    tensors["fc.weight"] = random(hidden, features * feature_size, scale=0.1)
    tensors["norm.weight"] = 1 + random(hidden)
    if embed:
        tensors["embed_tokens.weight"] = random(target_vocab, hidden, scale=1.0)
    if lm_head:
        tensors["lm_head.weight"] = random(draft_vocab, hidden)
    if draft_vocab != target_vocab:
        known = torch.randperm(target_vocab, generator=generator)[:draft_vocab].sort().values
        tensors["d2t"] = known - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(target_vocab, dtype=torch.bool).scatter_(0, known, True)
    return tensors | (extra or {})


CHAINED3 = {
    **LAYER,
    "num_key_value_heads": HEADS,
    "attention_bias": True,
    "eagle_aux_hidden_state_layer_ids": [2, 0, 1],
}
"""Config of `chained_eagle3`, but for its vocabulary."""


def chained_eagle3(model: LlamaForCausalLM, *, draft_vocab: int, near: float = 0.02) -> dict[str, torch.Tensor]:
    """A layer that passes the embedding on, but for noise, as `tiny_model` does; of EAGLE-3's layout, where that takes
    attention: queries and keys are constant, so that rotation makes every position attend to itself, and values are
    the embedding without what the residual stream holds already."""
    tensors = eagle3_tensors(draft_vocab=draft_vocab, embed=False)
    generator, one = torch.Generator().manual_seed(4), torch.eye(HIDDEN)
    for key, tensor in tensors.items():
        if tensor.is_floating_point():
            tensors[key] = torch.ones_like(tensor) if tensor.ndim == 1 else near * tensor
    name, half = "midlayer.self_attn", HIDDEN // HEADS // 2
    constant = torch.cat([torch.full((half,), 10.0), torch.zeros(half)]).repeat(HEADS)
    noise = near * torch.randn((HIDDEN, 2 * HIDDEN), generator=generator)
    tensors |= {f"{name}.{part}_proj.weight": torch.zeros(HIDDEN, 2 * HIDDEN) for part in "qk"}
    tensors |= {f"{name}.{part}_proj.bias": constant.clone() for part in "qk"}
    tensors |= {f"{name}.v_proj.weight": torch.cat([one, -one], 1) + noise, f"{name}.v_proj.bias": torch.zeros(HIDDEN)}
    tensors[f"{name}.o_proj.weight"] = one
    known = torch.arange(draft_vocab) + tensors.get("d2t", torch.zeros(draft_vocab, dtype=torch.long))
    tensors["lm_head.weight"] = model.lm_head.weight.detach()[known]
    return tensors


def write_eagle(
    directory: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], *, pickled: bool = False
) -> str:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(tensors, directory / "pytorch_model.bin")
    else:
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, directory / "model.safetensors")
    return str(directory)


def safeailab3(**changes: Any) -> dict[str, Any]:
    return {**LAYER, "draft_vocab_size": VOCAB, **changes}


def library3(layer: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """The `speculators` library's config."""
    return {
        "speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"], "draft_vocab_size": VOCAB,
        "transformer_layer_config": {**LAYER, **(layer or {})}, **changes,
    }  # fmt: skip
