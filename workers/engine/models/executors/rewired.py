"""Architectures that compute their attention themselves, made to ask the attention function like all others.

Their modules keep weights and projections; only what lies between query, key and value and the output projection is
replaced, by way of a subclass. ALiBi reaches the attention function as a slope for each head.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import AttentionMaskInterface
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon
from transformers.models.mpt import modeling_mpt

from workers.engine.models.executors.hf import IMPLEMENTATION, packed_attention

MASKLESS = f"{IMPLEMENTATION}-maskless"
"""Set in the config of such a model, whose own code takes a mask for granted: a mask of a single zero, never read."""


class PackedBloomAttention(modeling_bloom.BloomAttention):  # type: ignore[misc]
    def forward(self, hidden_states: torch.Tensor, residual: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        slopes = bloom_slopes(self.num_heads, hidden_states.device)
        attended, _none = packed_attention(self, query, key, value, None, self.inv_norm_factor, slopes=slopes)
        return self.dense(attended.flatten(2)) + residual, None


class PackedMptAttention(modeling_mpt.MptAttention):  # type: ignore[misc]
    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        mixed = self.Wqkv(hidden_states)
        if self.clip_qkv:
            mixed = mixed.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        query, key, value = (
            part.unflatten(2, (self.n_heads, self.head_dim)).transpose(1, 2) for part in mixed.chunk(3, 2)
        )
        slopes = mpt_slopes(self.n_heads, hidden_states.device)
        attended, _none = packed_attention(self, query, key, value, None, self.softmax_scale, slopes=slopes)
        return self.out_proj(attended.flatten(2)), None


class PackedFalconAttention(modeling_falcon.FalconAttention):  # type: ignore[misc]
    def forward(
        self,
        hidden_states: torch.Tensor,
        alibi: torch.Tensor | None,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        query, key, value = self._split_heads(self.query_key_value(hidden_states))
        # The new layout repeats each key head for the queries that share it.
        shared = key.shape[2] // self.num_kv_heads
        query, key, value = (part.transpose(1, 2) for part in (query, key[:, :, ::shared], value[:, :, ::shared]))
        slopes = None
        if alibi is not None:
            slopes = falcon_slopes(self.num_heads, hidden_states.device) * self.inv_norm_factor
        elif position_embeddings is not None:
            query, key = modeling_falcon.apply_rotary_pos_emb(query, key, *position_embeddings)
        attended, _none = packed_attention(self, query, key, value, None, self.inv_norm_factor, slopes=slopes)
        return self.dense(attended.flatten(2)), None


REWIRED: dict[type[nn.Module], type[nn.Module]] = {
    modeling_bloom.BloomAttention: PackedBloomAttention,
    modeling_mpt.MptAttention: PackedMptAttention,
    modeling_falcon.FalconAttention: PackedFalconAttention,
}
MODELS = (modeling_bloom.BloomForCausalLM, modeling_mpt.MptForCausalLM, modeling_falcon.FalconForCausalLM)
FLAGLESS = {"StableLmForCausalLM"}
"""Classes that do ask the attention function, though they do not say so."""


def can_ask(model_class: Any) -> bool:
    """Whether the attention of such a model comes from an attention function, or can be made to."""
    says_so = bool(getattr(model_class, "_supports_attention_backend", False))
    return says_so or model_class in MODELS or model_class.__name__ in FLAGLESS


def use_own_attention(model: Any) -> None:
    """Set a model to what transformers computes by itself."""
    if type(model) not in MODELS:
        model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")


def use_packed_attention(model: Any) -> None:
    """Set a model to our attention function."""
    if type(model) not in MODELS:
        model.set_attn_implementation(IMPLEMENTATION)
        return
    model.config._attn_implementation = MASKLESS
    for module in model.modules():
        if type(module) in REWIRED:
            module.__class__ = REWIRED[type(module)]


def _no_mask(
    *_: Any, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32, **__: Any
) -> torch.Tensor:
    return torch.zeros((1, 1, 1, 1), dtype=dtype, device=device)


AttentionMaskInterface.register(MASKLESS, _no_mask)


@cache
def bloom_slopes(heads: int, device: torch.device) -> torch.Tensor:
    slopes: torch.Tensor = modeling_bloom._get_alibi_slopes(heads, device).float()
    return slopes


@cache
def mpt_slopes(heads: int, device: torch.device) -> torch.Tensor:
    biases: torch.Tensor = modeling_mpt.build_mpt_alibi_tensor(heads, 2, device=device)  # a key back, and here
    return -biases[:, 0, 0]


@cache
def falcon_slopes(heads: int, device: torch.device) -> torch.Tensor:
    ones = torch.ones((1, 2), dtype=torch.long, device=device)
    biases: torch.Tensor = modeling_falcon.build_alibi_tensor(ones, heads, dtype=torch.float32)
    return biases[:, 0, 1]
