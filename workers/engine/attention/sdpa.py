"""torch's scaled_dot_product_attention over gathered keys: any device, a few kernel calls per layer.

Sequences with about as many rows form a group, and each group is one call: keys are gathered to [sequences, keys],
rows padded to the group's longest, and the query heads that share a KV head folded into the rows, so that no key is
repeated. Padding changes how torch sums: a row's low-order bits depend on the batch here.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention

from workers.engine.batch import Batch
from workers.engine.kernels.attention import AttentionRows
from workers.engine.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class Group:
    """B sequences with up to Q rows and L keys each."""

    rows: torch.Tensor
    """[B, Q] rows of the batch; padding repeats a sequence's last row."""
    slots: torch.Tensor
    """[B, L] slots of the keys; padding points at slot 0."""
    mask: torch.Tensor
    """[B, 1, Q, L] bool: which keys a row sees."""
    row_index: torch.Tensor
    """[R] distinct rows of the group, and ..."""
    source: torch.Tensor
    """[R] ... where each lies in the flattened [B * Q]."""


@dataclass(frozen=True, slots=True)
class SdpaPlan:
    groups: list[Group]
    cache: KVCache

    def attend(self, q: torch.Tensor, layer: int, scale: float) -> torch.Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        for group in self.groups:
            out[group.row_index] = _attend_group(q, keys, values, group, scale)[group.source]
        return out


class SdpaAttention:
    """`AttentionBackend` of any device and floating dtype."""

    def prepare(self, batch: Batch, cache: KVCache) -> SdpaPlan:
        spans: dict[int, list[tuple[int, int]]] = defaultdict(list)
        sequence = batch.rows.sequence
        starts = [0, *(np.flatnonzero(np.diff(sequence)) + 1).tolist(), len(sequence)]
        for first, last in pairwise(starts):
            spans[(last - first - 1).bit_length()].append((first, last))
        return SdpaPlan([_group(batch.rows, group, cache) for group in spans.values()], cache)


def _attend_group(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: Group, scale: float
) -> torch.Tensor:
    """Result of the group's rows, [B * Q, H, D]."""
    (B, Q), (_, H, D) = group.rows.shape, q.shape
    Hk = keys.shape[1]
    query = q[group.rows].view(B, Q, Hk, H // Hk, D).permute(0, 2, 3, 1, 4).reshape(B, Hk, H // Hk * Q, D)
    k, v = (pool[group.slots].transpose(1, 2) for pool in (keys, values))  # [B, Hk, L, D]
    mask = group.mask.repeat(1, 1, H // Hk, 1)
    out = scaled_dot_product_attention(query, k, v, attn_mask=mask, scale=scale)
    return out.view(B, Hk, H // Hk, Q, D).permute(0, 3, 1, 2, 4).reshape(B * Q, H, D)


def _group(rows: AttentionRows, spans: list[tuple[int, int]], cache: KVCache) -> Group:
    """Index tensors of the sequences whose rows are `spans`."""
    B = len(spans)
    Q = max(last - first for first, last in spans)
    columns = [_columns(rows, first, last) for first, last in spans]
    L = max(len(slots) for slots, _ in columns)
    index = np.zeros((B, Q), np.int64)
    slots = np.zeros((B, L), np.int64)
    mask = np.zeros((B, 1, Q, L), np.bool_)
    for b, ((first, last), (own, seen)) in enumerate(zip(spans, columns, strict=True)):
        index[b] = np.minimum(np.arange(first, first + Q), last - 1)
        slots[b, : len(own)] = own
        mask[b, 0, : last - first, : len(own)] = seen
        mask[b, 0, last - first :] = mask[b, 0, last - first - 1]
    source = np.concatenate([b * Q + np.arange(last - first) for b, (first, last) in enumerate(spans)])
    arrays = (index, slots, mask, index.reshape(-1)[source], source)
    return Group(*(torch.from_numpy(array).to(cache.shape.device) for array in arrays))


def _columns(rows: AttentionRows, first: int, last: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Slots of the keys of one sequence, prefix and then tails, and which of them each row sees."""
    prefix = rows.prefix_lens[first:last]
    positions = np.arange(prefix.max())
    table, size = rows.block_tables[rows.sequence[first]], rows.block_size
    start, end = rows.tail_indptr[first], rows.tail_indptr[last]
    tail, inverse = np.unique(rows.tail_slots[start:end], return_inverse=True)
    seen = np.zeros((last - first, len(positions) + len(tail)), np.bool_)
    seen[:, : len(positions)] = positions < prefix[:, None]
    owner = np.repeat(np.arange(last - first), np.diff(rows.tail_indptr[first : last + 1]))
    seen[owner, len(positions) + inverse] = True
    slots = table[positions // size].astype(np.int64) * size + positions % size
    return np.concatenate([slots, tail.astype(np.int64)]), seen
