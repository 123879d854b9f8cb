"""The compiled CPU kernel as a backend; bit for bit independent of the batch. The default on the CPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workers.engine.kernels.cpu.attention import paged_attention
from workers.engine.state.batch import Batch
from workers.engine.state.kv_cache import KVCache
from workers.engine.state.rows import PLAIN, AttentionRows, Weighing


@dataclass(frozen=True, slots=True)
class CompiledPlan:
    rows: AttentionRows
    cache: KVCache

    def attend(self, q: torch.Tensor, layer: int, scale: float, weighing: Weighing = PLAIN) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype)
        paged_attention(q, self.cache.keys[layer], self.cache.values[layer], self.rows, scale, out, weighing)
        return out


class CompiledAttention:
    """`AttentionBackend` for float32 and bfloat16 on the CPU."""

    def prepare(self, batch: Batch, cache: KVCache) -> CompiledPlan:
        return CompiledPlan(batch.rows, cache)
