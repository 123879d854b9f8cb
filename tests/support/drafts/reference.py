"""Medusa's heads and EAGLE's draft layers written straight from the papers: whole sequences, no cache, no batch."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from tests.support.drafts.weights import HEADS, KV_HEADS

Tensors = dict[str, torch.Tensor]


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def rotate(x: torch.Tensor, theta: float = 10000.0) -> torch.Tensor:
    """Rotary embedding of [T, H, D] at positions 0, 1, ...: pairs (j, j + D/2) turn by position * theta^(-2j/D)."""
    length, _, width = x.shape
    half = width // 2
    angle = torch.arange(length)[:, None] * theta ** (-torch.arange(half) * 2 / width)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def attention(x: torch.Tensor, t: Tensors, name: str) -> torch.Tensor:
    """Causal self-attention of [T, N] inputs."""
    length = len(x)

    def project(part: str, heads: int) -> torch.Tensor:
        y = x @ t[f"{name}.{part}_proj.weight"].T + t.get(f"{name}.{part}_proj.bias", torch.zeros(()))
        y = y.view(length, heads, -1)
        return rms_norm(y, t[f"{name}.{part}_norm.weight"]) if f"{name}.{part}_norm.weight" in t else y

    q, k, v = rotate(project("q", HEADS)), rotate(project("k", KV_HEADS)), project("v", KV_HEADS)
    k, v = (y.repeat_interleave(HEADS // KV_HEADS, dim=1) for y in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    hidden_future = torch.ones(length, length).triu(1).bool()
    weights = scores.masked_fill(hidden_future, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).reshape(length, -1) @ t[f"{name}.o_proj.weight"].T


def mlp(x: torch.Tensor, t: Tensors, name: str) -> torch.Tensor:
    gate, up = x @ t[f"{name}.gate_proj.weight"].T, x @ t[f"{name}.up_proj.weight"].T
    return (gate * gate.sigmoid() * up) @ t[f"{name}.down_proj.weight"].T


def decoder_layer(residual: torch.Tensor, attended: torch.Tensor, t: Tensors, name: str) -> torch.Tensor:
    hidden = residual + attended
    return hidden + mlp(rms_norm(hidden, t[f"{name}.post_attention_layernorm.weight"]), t, f"{name}.mlp")


@dataclass
class Eagle:
    """`embed` [V, N]; `outputs` maps features and the tokens after them to what stands for the next features."""

    t: Tensors
    embed: torch.Tensor
    version: int
    layer: str = "layers.0"
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    def encode(self, features: torch.Tensor) -> torch.Tensor:
        if self.version == 1:
            return features
        if self.norm_before_fc:
            features = rms_norm(features, self.t["input_norm.weight"])
        if self.fc_norm:
            parts = features.chunk(sum(key.startswith("fc_norm") for key in self.t), dim=-1)
            features = torch.cat([rms_norm(p, self.t[f"fc_norm.{i}.weight"]) for i, p in enumerate(parts)], dim=-1)
        return features @ self.t["fc.weight"].T

    def outputs(self, encoded: torch.Tensor, tokens: Seq[int]) -> torch.Tensor:
        t, name, e = self.t, self.layer, self.embed[list(tokens)]
        if self.version == 1:
            x = torch.cat([e, encoded], dim=-1) @ t["fc.weight"].T + t.get("fc.bias", torch.zeros(()))
            return decoder_layer(x, attention(x, t, f"{name}.self_attn"), t, name)
        g = rms_norm(encoded, t[f"{name}.hidden_norm.weight"])
        x = torch.cat([rms_norm(e, t[f"{name}.input_layernorm.weight"]), g], dim=-1)
        residual = g if self.norm_before_residual else encoded
        out = decoder_layer(residual, attention(x, t, f"{name}.self_attn"), t, name)
        return rms_norm(out, t["norm.weight"]) if self.norm_output else out

    def logits(self, outputs: torch.Tensor, lm_head: torch.Tensor) -> torch.Tensor:
        if self.version == 3 and not self.norm_output:
            outputs = rms_norm(outputs, self.t["norm.weight"])
        return outputs @ lm_head.T

    def draft(self, features: torch.Tensor, tokens: Seq[int], path: Seq[int]) -> torch.Tensor:
        """Output after each token of a drafted path: entries of the path are made of the layer's own outputs.

        `features` are those of tokens[:-1]; entry i pairs features[i] with tokens[i + 1].
        """
        encoded, following = self.encode(features), list(tokens[1:])
        outputs = [self.outputs(encoded, following)[-1]]
        for token in path:
            encoded, following = torch.cat([encoded, outputs[-1][None]]), [*following, token]
            outputs.append(self.outputs(encoded, following)[-1])
        return torch.stack(outputs)


def medusa_logits(t: Tensors, head: int, num_blocks: int, hidden: torch.Tensor) -> torch.Tensor:
    for block in range(num_blocks):
        inner = hidden @ t[f"{head}.{block}.linear.weight"].T + t[f"{head}.{block}.linear.bias"]
        hidden = hidden + inner * inner.sigmoid()
    return hidden @ t[f"{head}.{num_blocks}.weight"].T
