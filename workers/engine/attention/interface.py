"""The seat of an attention backend, and the table of those who can take it."""

from __future__ import annotations

from importlib import import_module
from typing import Protocol

import torch

from workers.engine.api.errors import UnsupportedModel
from workers.engine.state.batch import Batch
from workers.engine.state.kv_cache import KVCache
from workers.engine.state.rows import PLAIN, Weighing


class AttentionPlan(Protocol):
    """Attention of one batch: whatever its layers share is prepared once."""

    def attend(self, q: torch.Tensor, layer: int, scale: float, weighing: Weighing = PLAIN) -> torch.Tensor:
        """softmax(scale * q k^T) v of every row over the keys that `Batch.rows` lists for it, as `weighing` has it.

        q is [T, H, D], the result likewise and contiguous. Query head h reads KV head h // (H / Hk). The rows' own keys
        and values are in the cache already (`write_rows`). Windows count the keys of a row, so positions: those of a
        node of a draft tree are the text's and its ancestors'. Blocks that lie wholly behind the window may be gone:
        the table then names the scratch block in their place.
        """
        ...


class AttentionBackend(Protocol):
    """Makes a plan for each batch. Knows the model by nothing but the shapes of its cache."""

    def prepare(self, batch: Batch, cache: KVCache) -> AttentionPlan: ...


BACKENDS = {
    "numba": "workers.engine.attention.cpu:CompiledAttention",
    "sdpa": "workers.engine.attention.sdpa:SdpaAttention",
    "reference": "workers.engine.attention.reference:ReferenceAttention",
}
COMPILED_DTYPES = (torch.float32, torch.bfloat16)


def resolve_attention(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """The backend that `name` stands for ("auto": the best for the device); `UnsupportedModel` if it cannot run."""
    if name == "auto":
        return "numba" if device.type == "cpu" and dtype in COMPILED_DTYPES else "sdpa"
    if name not in BACKENDS:
        raise UnsupportedModel(f"attention {name!r} is unknown; known: auto, {', '.join(BACKENDS)}")
    if name == "numba" and device.type != "cpu":
        raise UnsupportedModel(f"attention 'numba' runs on the CPU, the model is on {device}: choose sdpa")
    if name == "numba" and dtype not in COMPILED_DTYPES:
        raise UnsupportedModel(f"attention 'numba' reads float32 and bfloat16, the model has {dtype}: choose sdpa")
    return name


def load_attention(name: str) -> AttentionBackend:
    """The backend under a resolved name."""
    module, _, attribute = BACKENDS[name].partition(":")
    backend: AttentionBackend = getattr(import_module(module), attribute)()
    return backend


def write_rows(k: torch.Tensor, v: torch.Tensor, layer: int, batch: Batch, cache: KVCache) -> None:
    """Put the rows' keys and values, [T, Hk, D], where `Batch.slots` says."""
    cache.keys[layer].index_copy_(0, batch.slots, k)
    cache.values[layer].index_copy_(0, batch.slots, v)


def write_hidden(hidden: torch.Tensor, layer: int, batch: Batch, cache: KVCache) -> None:
    """Keep the rows' residual stream entering a layer (or FINAL), [T, N], if the cache keeps that layer's."""
    if layer in cache.hidden:
        cache.hidden[layer].index_copy_(0, batch.slots, hidden)
