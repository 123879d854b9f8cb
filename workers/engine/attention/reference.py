"""Attention a row at a time in float64: slow and obviously right. Every other backend is tested against it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workers.engine.state.batch import Batch
from workers.engine.state.kv_cache import KVCache
from workers.engine.state.rows import PLAIN, AttentionRows, Weighing


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

    def attend(self, q: torch.Tensor, layer: int, scale: float, weighing: Weighing = PLAIN) -> torch.Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        group = q.shape[1] // keys.shape[1]
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        for row, slots in enumerate(self.slots):
            seen = slots if weighing.window is None else slots[-weighing.window :]
            k = keys[seen].double().repeat_interleave(group, dim=1)  # [L, H, D]
            v = values[seen].double().repeat_interleave(group, dim=1)
            scores = torch.einsum("hd,lhd->hl", q[row].double() * scale, k)
            out[row] = torch.einsum("hl,lhd->hd", _weights(scores, weighing), v).to(q.dtype)
        return out


def _weights(scores: torch.Tensor, weighing: Weighing) -> torch.Tensor:
    """[H, L] scores of the keys that a row sees, its own key last, become weights."""
    if weighing.softcap is not None:
        scores = weighing.softcap * torch.tanh(scores / weighing.softcap)
    if weighing.slopes is not None:
        distance = torch.arange(scores.shape[1] - 1, -1, -1, device=scores.device)
        scores = scores - weighing.slopes.double()[:, None] * distance
    if weighing.sinks is None:
        return scores.softmax(dim=-1)
    return torch.cat([weighing.sinks.double()[:, None], scores], dim=1).softmax(dim=-1)[:, 1:]


class ReferenceAttention:
    """`AttentionBackend` of any device and dtype."""

    def prepare(self, batch: Batch, cache: KVCache) -> ReferencePlan:
        count = len(batch.rows.sequence)
        device = cache.shape.device
        return ReferencePlan([torch.tensor(row_slots(batch.rows, row), device=device) for row in range(count)], cache)
