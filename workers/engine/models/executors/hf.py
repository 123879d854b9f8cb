"""Any transformers causal LM over packed rows, through its AttentionInterface.

All rows travel as one sequence [1, T]; our attention function replaces the model's, and everything it needs comes as a
context of the forward pass. No mask is built, no transformers cache is used, no attribute is set on the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from workers.engine.api.errors import UnsupportedModel
from workers.engine.attention.interface import AttentionBackend, AttentionPlan, write_hidden, write_rows
from workers.engine.models.executor import ModelOutput
from workers.engine.models.facts import ModelFacts
from workers.engine.models.layers.experts import pack_experts
from workers.engine.models.layers.linear import pack_modules
from workers.engine.models.layers.precision import Precision
from workers.engine.models.layers.rowwise import make_rowwise
from workers.engine.models.shapes import effective_window
from workers.engine.models.trial import Trial
from workers.engine.state.batch import Batch
from workers.engine.state.kv_cache import CacheShape, KVCache
from workers.engine.state.rows import Weighing

FIRST_TOKENS = 4

IMPLEMENTATION = "nightdraft"


class LayerAttention(Protocol):
    """What a forward pass carries to the attention function."""

    def layer(
        self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, extra: dict[str, Any]
    ) -> torch.Tensor:
        """q [T, H, D], k and v [T, Hk, D] -> [T, H, D]; `extra` is what else the model handed to its attention."""
        ...


_carried: ContextVar[LayerAttention] = ContextVar("nightdraft_step")


@contextmanager
def carrying(step: LayerAttention) -> Iterator[None]:
    """For a forward pass in here, `step` attends. Not an argument of it: not every model hands its arguments on."""
    token = _carried.set(step)
    try:
        yield
    finally:
        _carried.reset(token)


def packed_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **extra: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls: [1, H, T, D] in, [1, T, H, D] out."""
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    return _carried.get().layer(module, q, k, v, scale, {"attention_mask": attention_mask, **extra})[None], None


AttentionInterface.register(IMPLEMENTATION, packed_attention)


@dataclass(frozen=True, slots=True)
class CachedStep:
    """`LayerAttention` of a real step: write the rows, attend over the cache."""

    batch: Batch
    cache: KVCache
    plan: AttentionPlan
    max_model_len: int

    def layer(
        self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, extra: dict[str, Any]
    ) -> torch.Tensor:
        write_rows(k, v, module.layer_idx, self.batch, self.cache)
        return self.plan.attend(q, module.layer_idx, scale, weighing_of(extra, self.max_model_len))


def weighing_of(extra: dict[str, Any], max_model_len: int) -> Weighing:
    """What transformers hands to an attention function beyond a plain softmax."""
    window = effective_window(extra.get("sliding_window"), max_model_len)
    return Weighing(window, extra.get("softcap"), extra.get("slopes"), extra.get("s_aux"))


class HuggingFaceExecutor:
    """`Executor` over a transformers model that `checks` has let in. Takes the model over."""

    def __init__(
        self, model: Any, attention: AttentionBackend, shape: CacheShape, max_model_len: int, precision: Precision
    ) -> None:
        self.facts = self.facts_of(model, shape, max_model_len)
        self.precision = precision
        self.attention = attention
        self._model = model
        quantised = precision.quantise_modules(model)
        self.weight_bytes = quantised + sum(tensor.nbytes for tensor in model.parameters())
        pack_modules(model)
        pack_experts(model)
        if shape.device.type == "cpu":
            make_rowwise(model, lambda: Trial(self).chain(range(1, 1 + FIRST_TOKENS)))

    @classmethod
    def facts_of(cls, model: Any, shape: CacheShape, max_model_len: int) -> ModelFacts:
        """Of a transformers model with weights or without."""
        vocab = int(model.get_output_embeddings().weight.shape[0])
        return ModelFacts(shape, vocab, max_model_len, cls.__name__, lends_vocabulary=True)

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: KVCache) -> ModelOutput:
        step = CachedStep(batch, cache, self.attention.prepare(batch, cache), self.facts.max_model_len)
        with carrying(step):
            out = self._model(
                input_ids=batch.input_ids[None],
                position_ids=batch.positions[None],
                use_cache=False,
                logits_to_keep=batch.logits_rows,
                output_hidden_states=bool(cache.hidden),
            )
        for layer in cache.hidden:
            # transformers lists what enters each layer, and last what the final norm gives.
            states = out.hidden_states[layer]
            if states.shape[:-1] != batch.input_ids[None].shape:
                kind = f"{self._model.config.model_type} has several residual streams ({tuple(states.shape)})"
                raise UnsupportedModel(f"{kind}: methods medusa and eagle cannot draft for it")
            write_hidden(states[0], layer, batch, cache)
        return ModelOutput(out.logits[0])

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        table: torch.Tensor = self._model.get_input_embeddings().weight
        return table[ids]

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._model.get_output_embeddings()(hidden)
        return logits
