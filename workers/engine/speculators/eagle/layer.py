"""EAGLE's draft layer over packed rows, with a KV cache of its own.

Entry i of that cache is made of the target's feature of token i and of token i + 1; its output stands for the feature
of token i + 1. So an entry needs the token after it, which the cache calls a shift of 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.functional import embedding, silu
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from workers.engine.api.errors import UnsupportedModel
from workers.engine.attention.interface import AttentionBackend, write_rows
from workers.engine.models.executor import LoadedModel
from workers.engine.models.facts import ModelFacts
from workers.engine.models.layers.precision import Precision, Unread
from workers.engine.models.layers.quantised import AnyLinear
from workers.engine.models.loading.refusals import refusing
from workers.engine.speculators.eagle.checkpoint import UNUSED, EagleConfig, head_dim, target_ids
from workers.engine.speculators.shared.checkpoint import Tensors
from workers.engine.state.batch import Batch
from workers.engine.state.kv_cache import KVCache

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Layer, queries [T, H, D], keys and values [T, Hk, D] -> [T, H, D]. What a row attends to is the caller's matter."""


@dataclass(frozen=True, slots=True)
class Norm:
    """Root mean square norm over the last dimension, rounded where transformers rounds."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(x.dtype)


@dataclass(frozen=True, slots=True)
class DraftLayer:
    input_norm: Norm | None
    """Of the embeddings in EAGLE-3's first layer; EAGLE-1's first layer has none."""
    hidden_norm: Norm | None
    """EAGLE-3's first layer: of the features."""
    qkv: AnyLinear
    head_norms: tuple[Norm, Norm] | None
    out: AnyLinear
    mlp_norm: Norm
    gate_up: AnyLinear
    down: AnyLinear


@dataclass(frozen=True, slots=True)
class EagleWeights:
    fc: AnyLinear
    fc_norms: tuple[Norm, ...]
    """One for the joined features, or one for each; none when empty."""
    layers: tuple[DraftLayer, ...]
    norm: Norm | None
    """EAGLE-3: before the output matrix."""
    embedding: torch.Tensor | None
    """[V, N]; None: the target lends its own."""
    head: AnyLinear | None
    """Onto the draft's vocabulary; None: the target lends its own."""
    target_ids: torch.Tensor | None
    nbytes: int
    """Without what the target lends."""


class EagleModel:
    """`encode` the target's features, `forward` rows of (feature, token), and read `logits` off what comes out.

    What `forward` gives is fed back as the feature of drafted tokens. `run` is the layer alone, without cache or batch:
    with weights of `Trainable` gradients flow through it, and training brings an `Attend` of its own.
    """

    def __init__(
        self,
        config: EagleConfig,
        weights: EagleWeights,
        attention: AttentionBackend,
        precision: Precision,
        target: LoadedModel,
    ) -> None:
        self.config = config
        self.cache_shape = config.cache_shape(precision.dtype, precision.device)
        self.weight_bytes = weights.nbytes
        self._weights = weights
        self._embed, self._project = _embedder(weights, target), _projector(weights, target)
        self._attention = attention
        self._dtype = precision.dtype
        self._rotary = LlamaRotaryEmbedding(config.layer).to(precision.device)
        layer = config.layer
        self._heads = int(layer.num_attention_heads), int(layer.num_key_value_heads), head_dim(layer)

    def encode(self, features: torch.Tensor) -> torch.Tensor:
        """[T, features * feature_size] hidden states of the target, side by side -> [T, N] inputs of `forward`."""
        features = features.to(self._dtype)
        if self.config.version == 1:
            return features
        norms = self._weights.fc_norms
        if norms:
            parts = features.chunk(len(norms), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(norms, parts, strict=True)], dim=-1)
        return self._weights.fc(features)

    def forward(self, batch: Batch, features: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """[num_rows, N] -> [num_rows, N]. Keys and values of every row are written to its slot."""
        padding = len(batch.input_ids) - len(features)
        if padding:
            features = torch.cat([features, features.new_zeros(padding, features.shape[1])])
        plan = self._attention.prepare(batch, cache)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            write_rows(k, v, layer, batch, cache)
            return plan.attend(q.contiguous(), layer, q.shape[-1] ** -0.5)

        return self.run(batch.input_ids, batch.positions, features, attend)[: batch.num_rows]

    def run(
        self, input_ids: torch.Tensor, positions: torch.Tensor, features: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Tokens [T], their positions [T] and features [T, N] -> [T, N]."""
        embedded = self._embed(input_ids).to(features.dtype)
        rotation = self._rotary(features, positions[None])
        hidden = features
        if self.config.version == 1:
            hidden = self._weights.fc(torch.cat([embedded, features], dim=-1))
        for index, layer in enumerate(self._weights.layers):
            residual, normed = self._enter(layer, embedded, hidden)
            hidden = residual + layer.out(attend(index, *self._heads_of(layer, normed, rotation)).flatten(1))
            gate, up = layer.gate_up(layer.mlp_norm(hidden)).chunk(2, dim=-1)
            hidden = hidden + layer.down(silu(gate) * up)
        if self.config.norm_output and self._weights.norm:
            hidden = self._weights.norm(hidden)
        return hidden

    def _enter(
        self, layer: DraftLayer, embedded: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream and what attention reads."""
        if layer.hidden_norm is None or layer.input_norm is None:
            return hidden, layer.input_norm(hidden) if layer.input_norm else hidden
        normed = layer.hidden_norm(hidden)
        residual = normed if self.config.norm_before_residual else hidden
        return residual, torch.cat([layer.input_norm(embedded), normed], dim=-1)

    def _heads_of(
        self, layer: DraftLayer, normed: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [T, H, D], keys and values [T, Hk, D], rotated."""
        heads, kv_heads, width = self._heads
        qkv = layer.qkv(normed).view(len(normed), heads + 2 * kv_heads, width)
        q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
        if layer.head_norms:
            q, k = layer.head_norms[0](q), layer.head_norms[1](k)
        cos, sin = rotation
        q, k = apply_rotary_pos_emb(q, k, cos[0], sin[0])
        return q, k, v

    def draft_logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """[R, N] -> [R, draft_vocab], in the draft's own ids."""
        norm = self._weights.norm
        if norm is not None and not self.config.norm_output:
            outputs = norm(outputs)
        return self._project(outputs)

    def logits(self, outputs: torch.Tensor) -> torch.Tensor:
        """[R, N] -> [R, V] in the target's ids, -inf where the draft has no such token."""
        logits = self.draft_logits(outputs)
        ids = self._weights.target_ids
        if ids is None:
            return logits
        wide = logits.new_full((len(logits), self.config.target_vocab), -torch.inf)
        return wide.index_copy_(1, ids, logits)


def _embedder(weights: EagleWeights, target: LoadedModel) -> Callable[[torch.Tensor], torch.Tensor]:
    if (table := weights.embedding) is not None:
        return lambda ids: embedding(ids, table)
    assert target.lender is not None  # the builder saw to it
    return target.lender.embed


def _projector(weights: EagleWeights, target: LoadedModel) -> Callable[[torch.Tensor], torch.Tensor]:
    if weights.head is not None:
        return weights.head
    assert target.lender is not None
    lent, dtype = target.lender.project, target.facts.cache_shape.dtype
    return lambda outputs: lent(outputs.to(dtype))


def build_eagle(
    config: EagleConfig, tensors: Tensors, target: LoadedModel, attention: AttentionBackend, precision: Precision
) -> EagleModel:
    """Take every tensor that the config asks for.

    Raises `UnsupportedModel` for a missing, mismatching or unknown tensor, and when the target has to lend its
    embeddings or its output matrix and cannot.
    """
    with refusing(tensors.name):
        weights = _Builder(config, tensors, target.facts, precision).weights()
        return EagleModel(config, weights, attention, precision, target)


def check_eagle(config: EagleConfig, tensors: Tensors, target: ModelFacts) -> None:
    """Raise what `build_eagle` would raise, by names and shapes alone: nothing is read but the draft's vocabulary."""
    with refusing(tensors.name):
        _Builder(config, tensors, target, Unread()).weights()


class _Builder:
    def __init__(self, config: EagleConfig, tensors: Tensors, target: ModelFacts, precision: Precision) -> None:
        self._config = config
        self._tensors = tensors
        self._target = target
        self._precision = precision
        self._nbytes = 0
        self._eps = float(config.layer.rms_norm_eps)

    def weights(self) -> EagleWeights:
        config, hidden = self._config, self._config.hidden_size
        joined = len(config.feature_layers) * config.feature_size
        weights = EagleWeights(
            fc=self._linear(hidden, 2 * hidden if config.version == 1 else joined, "fc", bias=config.fc_bias),
            fc_norms=self._fc_norms(joined),
            layers=tuple(self._layer(index) for index in range(config.num_layers)),
            norm=self._norm("norm", hidden) if config.version == 3 else None,
            embedding=self._embedding(),
            head=self._head(),
            target_ids=self._target_ids(),
            nbytes=self._nbytes,
        )
        self._tensors.finish(UNUSED)
        return weights

    def _fc_norms(self, joined: int) -> tuple[Norm, ...]:
        if self._config.norm_before_fc:
            return (self._norm("input_norm", joined),)
        if self._config.fc_norm:
            count = len(self._config.feature_layers)
            return tuple(self._norm(f"fc_norm.{part}", joined // count) for part in range(count))
        return ()

    def _layer(self, index: int) -> DraftLayer:
        config, hidden = self._config, self._config.hidden_size
        layer, name = config.layer, f"layers.{index}"
        inner, width = int(layer.intermediate_size), head_dim(layer)
        query, key = layer.num_attention_heads * width, layer.num_key_value_heads * width
        fuses = config.version == 3 and index == 0
        entry = 2 * hidden if fuses else hidden
        biased = bool(getattr(layer, "attention_bias", False) or getattr(layer, "qkv_bias", False))
        attention = [(query, entry, f"{name}.self_attn.{part}_proj") for part in "qkv"]
        attention[1:] = [(key, entry, tensor) for _, _, tensor in attention[1:]]
        norms = None
        if config.head_norms:
            norms = self._norm(f"{name}.self_attn.q_norm", width), self._norm(f"{name}.self_attn.k_norm", width)
        mlp_bias = bool(getattr(layer, "mlp_bias", False))
        return DraftLayer(
            input_norm=self._norm(f"{name}.input_layernorm", hidden) if config.version == 3 or index else None,
            hidden_norm=self._norm(f"{name}.hidden_norm", hidden) if fuses else None,
            qkv=self._joined(attention, bias=biased),
            head_norms=norms,
            out=self._linear(hidden, query, f"{name}.self_attn.o_proj"),
            mlp_norm=self._norm(f"{name}.post_attention_layernorm", hidden),
            gate_up=self._joined(
                [(inner, hidden, f"{name}.mlp.gate_proj"), (inner, hidden, f"{name}.mlp.up_proj")], bias=mlp_bias
            ),
            down=self._linear(hidden, inner, f"{name}.mlp.down_proj", bias=mlp_bias),
        )

    def _embedding(self) -> torch.Tensor | None:
        table = self._tensors.find("embed_tokens.weight", self._config.target_vocab, self._config.hidden_size)
        if table is None:
            self._require_lender("embed_tokens.weight")
            return None
        own = self._ready(table)
        self._nbytes += own.nbytes
        return own

    def _head(self) -> AnyLinear | None:
        vocab, hidden = self._config.draft_vocab, self._config.hidden_size
        if "lm_head.weight" in self._tensors:
            return self._linear(vocab, hidden, "lm_head")
        if vocab != self._config.target_vocab:
            self._tensors.take("lm_head.weight", vocab, hidden)
        self._require_lender("lm_head.weight")
        return None

    def _require_lender(self, key: str) -> None:
        """Where a tensor of the draft is missing because it is the target's own, the target must lend it."""
        name, target = self._tensors.name, self._target
        if self._config.hidden_size != self._config.feature_size:
            raise UnsupportedModel(f"{name}: tensor {key} is missing, and the target's has another width")
        if not target.lends_vocabulary:
            raise UnsupportedModel(f"{name}: tensor {key} is missing, and {target.executor} cannot lend its own")

    def _target_ids(self) -> torch.Tensor | None:
        ids = target_ids(self._tensors, self._config)
        return None if ids is None else ids.to(self._precision.device)

    def _norm(self, name: str, width: int) -> Norm:
        weight = self._ready(self._tensors.take(f"{name}.weight", width))
        self._nbytes += weight.nbytes
        return Norm(weight, self._eps)

    def _linear(self, rows: int, columns: int, name: str, *, bias: bool = False) -> AnyLinear:
        return self._joined([(rows, columns, name)], bias=bias)

    def _joined(self, parts: list[tuple[int, int, str]], *, bias: bool = False) -> AnyLinear:
        """Several matrices over one input. With `bias`, or where the first one has one, all of them need one."""
        weights = [self._ready(self._tensors.take(f"{name}.weight", rows, columns)) for rows, columns, name in parts]
        biases = None
        if bias or f"{parts[0][2]}.bias" in self._tensors:
            biases = [self._ready(self._tensors.take(f"{name}.bias", rows)) for rows, _, name in parts]
        linear = self._precision.linear(weights, biases)
        self._nbytes += linear.nbytes
        return linear

    def _ready(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._precision.ready(tensor)
