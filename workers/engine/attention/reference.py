"""Attention a row at a time in float64: slow and obviously right. Every other backend is tested against it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workers.engine.batch import Batch
from workers.engine.kernels.attention import AttentionRows
from workers.engine.kv_cache import KVCache


def row_slots(rows: AttentionRows, row: int) -> list[int]:
    """Slots of the keys that a row attends to, root side first."""
    table, size = rows.block_tables[rows.sequence[row]], rows.block_size
    prefix = [int(table[p // size]) * size + p % size for p in range(rows.prefix_lens[row])]
    tail: list[int] = rows.tail_slots[rows.tail_indptr[row] : rows.tail_indptr[row + 1]].tolist()
    return prefix + tail


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    slots: list[torch.Tensor]
    cache: KVCache

    def attend(self, q: torch.Tensor, layer: int, scale: float) -> torch.Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        group = q.shape[1] // keys.shape[1]
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        for row, slots in enumerate(self.slots):
            k = keys[slots].double().repeat_interleave(group, dim=1)  # [L, H, D]
            v = values[slots].double().repeat_interleave(group, dim=1)
            weights = torch.einsum("hd,lhd->hl", q[row].double() * scale, k).softmax(dim=-1)
            out[row] = torch.einsum("hl,lhd->hd", weights, v).to(q.dtype)
        return out


class ReferenceAttention:
    """`AttentionBackend` of any device and dtype."""

    def prepare(self, batch: Batch, cache: KVCache) -> ReferencePlan:
        count = len(batch.rows.sequence)
        device = cache.shape.device
        return ReferencePlan([torch.tensor(row_slots(batch.rows, row), device=device) for row in range(count)], cache)
