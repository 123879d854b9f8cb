"""A lean executor for the Llama family on the CPU: the same numbers as transformers', few operations per layer.

Query, key and value share one matrix product, gate and up another; what lies between the products is one compiled
kernel each. It takes the weights out of the transformers model as it goes, so that the model is never in memory twice
(a tied output matrix is: once as a table to look tokens up, once laid out for the product).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

from workers.engine.attention.interface import AttentionBackend, write_hidden
from workers.engine.kernels.cpu.elementwise import Rotation, add_norm, rotate_and_cache, silu_mul
from workers.engine.models.executor import ModelOutput
from workers.engine.models.facts import ModelFacts
from workers.engine.models.layers.precision import Precision
from workers.engine.models.layers.quantised import AnyLinear
from workers.engine.models.shapes import windows
from workers.engine.models.skipping import NOTHING, SkipSet
from workers.engine.state.batch import Batch
from workers.engine.state.kv_cache import FINAL, CacheShape, KVCache
from workers.engine.state.rows import Weighing

FAMILY = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)


@dataclass(frozen=True, slots=True)
class Layer:
    attention_norm: torch.Tensor
    qkv: AnyLinear
    head_norms: tuple[torch.Tensor, torch.Tensor] | None
    """Qwen3: RMS norm weights of query and key heads."""
    out: AnyLinear
    mlp_norm: torch.Tensor
    gate_up: AnyLinear
    down: AnyLinear


def covers(model: Any, device: torch.device | None = None) -> bool:
    """Whether the fused layers compute exactly what this transformers model computes.

    `device`: where it will run, for a model without weights on the meta device.
    """
    kind = (device or model.device).type
    if type(model) not in FAMILY or kind != "cpu" or model.dtype not in (torch.float32, torch.bfloat16):
        return False
    layer = model.model.layers[0]
    linears = (layer.self_attn.q_proj, layer.self_attn.o_proj, layer.mlp.gate_proj, layer.mlp.down_proj)
    return (
        model.config.hidden_act == "silu"
        and all(type(module) is nn.Linear for module in linears)
        and 2 * len(model.model.rotary_emb.inv_freq) == layer.self_attn.head_dim
    )


class FusedExecutor:
    """`Executor` over the weights of a model that `covers` accepts. Leaves the model without layers."""

    def __init__(
        self, model: Any, attention: AttentionBackend, shape: CacheShape, max_model_len: int, precision: Precision
    ) -> None:
        config = model.config
        self.facts = self.facts_of(model, shape, max_model_len)
        self.precision = precision
        self.attention = attention
        cos, sin = _rotation_table(model, max_model_len)
        layer = shape.layers[0]
        self._rotation = Rotation(config.num_attention_heads, layer.num_kv_heads, layer.head_dim, cos, sin)
        self._weighings = [Weighing(window) for window in windows(config, max_model_len)]
        self._scale = float(model.model.layers[0].self_attn.scaling)
        self._eps = float(config.rms_norm_eps)
        self._intermediate = int(config.intermediate_size)
        self._layers: list[Layer] = []
        for index, layer in enumerate(model.model.layers):
            self._layers.append(_fuse(layer, precision))
            model.model.layers[index] = nn.Identity()
        self._embedding: torch.Tensor = model.get_input_embeddings().weight.detach()
        self._norm = model.model.norm.weight.detach()
        self._head = _pack(precision, model.get_output_embeddings())
        linears = [linear for layer in self._layers for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        self.weight_bytes = self._embedding.nbytes + self._head.nbytes + sum(linear.nbytes for linear in linears)

    @classmethod
    def facts_of(cls, model: Any, shape: CacheShape, max_model_len: int) -> ModelFacts:
        """Of a transformers model with weights or without."""
        vocab = int(model.get_output_embeddings().weight.shape[0])
        return ModelFacts(shape, vocab, max_model_len, cls.__name__, skips=True, lends_vocabulary=True)

    def forward(self, batch: Batch, cache: KVCache) -> ModelOutput:
        return self.forward_skipping(batch, cache, NOTHING)

    @torch.inference_mode()
    def forward_skipping(self, batch: Batch, cache: KVCache, skip: SkipSet) -> ModelOutput:
        hidden = self._embedding.index_select(0, batch.input_ids)  # [T, N], the residual stream
        delta = self._run_layers(hidden, batch, cache, skip)
        if FINAL in cache.hidden:
            normed = self._final_norm(hidden, delta)
            write_hidden(normed, FINAL, batch, cache)
            return ModelOutput(self._head(normed.index_select(0, batch.logits_rows)))
        hidden = hidden.index_select(0, batch.logits_rows)
        delta = None if delta is None else delta.index_select(0, batch.logits_rows)
        return ModelOutput(self._head(self._final_norm(hidden, delta)))

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self._embedding.index_select(0, ids)

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._head(hidden)
        return logits

    def _final_norm(self, hidden: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        normed = torch.empty_like(hidden)
        add_norm(hidden, delta, self._norm, self._eps, normed)
        return normed

    def _run_layers(self, hidden: torch.Tensor, batch: Batch, cache: KVCache, skip: SkipSet) -> torch.Tensor | None:
        """Advance `hidden` in place; returns what the last layer still has to add to it."""
        plan = self.attention.prepare(batch, cache)
        count, rotation = len(hidden), self._rotation
        heads = (count, rotation.heads + 2 * rotation.kv_heads, rotation.width)
        normed = torch.empty_like(hidden)
        gated = torch.empty((count, self._intermediate), dtype=hidden.dtype)
        delta: torch.Tensor | None = None
        for index, layer in enumerate(self._layers):
            if index not in skip.attention:
                add_norm(hidden, delta, layer.attention_norm, self._eps, normed)
                write_hidden(hidden, index, batch, cache)
                qkv = layer.qkv(normed)
                rotate_and_cache(
                    qkv, batch.positions, batch.slots, rotation, layer.head_norms, self._eps,
                    cache.keys[index], cache.values[index],
                )  # fmt: skip
                attended = plan.attend(qkv.view(heads)[:, : rotation.heads], index, self._scale, self._weighings[index])
                delta = layer.out(attended.view(count, -1))
            if index not in skip.mlp:
                add_norm(hidden, delta, layer.mlp_norm, self._eps, normed)
                silu_mul(layer.gate_up(normed), gated)
                delta = layer.down(gated)
        return delta


def _rotation_table(model: Any, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of the model's own rotary module, [positions, width]: any way of scaling it works."""
    with torch.inference_mode():
        like = torch.empty(0, dtype=model.dtype)
        cos, sin = model.model.rotary_emb(like, torch.arange(positions)[None])
    return cos[0].contiguous(), sin[0].contiguous()


def _fuse(layer: Any, precision: Precision) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    norms = None
    if hasattr(attention, "q_norm"):
        norms = attention.q_norm.weight.detach(), attention.k_norm.weight.detach()
    return Layer(
        attention_norm=layer.input_layernorm.weight.detach(),
        qkv=_pack(precision, attention.q_proj, attention.k_proj, attention.v_proj),
        head_norms=norms,
        out=_pack(precision, attention.o_proj),
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=_pack(precision, mlp.gate_proj, mlp.up_proj),
        down=_pack(precision, mlp.down_proj),
    )


def _pack(precision: Precision, *modules: nn.Linear) -> AnyLinear:
    biases = [module.bias.detach() for module in modules if module.bias is not None]
    return precision.linear([module.weight.detach() for module in modules], biases or None)
