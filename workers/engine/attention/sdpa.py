"""Attention over gathered keys in torch's own operations: any device, a few kernel calls per layer.

Sequences with about as many rows form a group, and each group is one call: keys are gathered to [sequences, keys],
rows padded to the group's longest, and the query heads that share a KV head folded into the rows, so that no key is
repeated. Padding changes how torch sums: a row's low-order bits depend on the batch here.

scaled_dot_product_attention does it all where a mask says everything; it knows no softcap, slope or sink.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention

from workers.engine.state.batch import Batch
from workers.engine.state.kv_cache import KVCache
from workers.engine.state.rows import PLAIN, AttentionRows, Weighing


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
    distance: torch.Tensor | None
    """[B, 1, Q, L] int64: how many positions a key lies behind a row that sees it; for slopes alone."""


@dataclass(frozen=True, slots=True)
class SdpaPlan:
    rows: AttentionRows
    cache: KVCache
    groups: dict[tuple[int | None, bool], list[Group]] = field(default_factory=dict)
    """By the window they were made for, and whether with distances: layers of one kind share them."""

    def attend(self, q: torch.Tensor, layer: int, scale: float, weighing: Weighing = PLAIN) -> torch.Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        for group in self._groups(weighing.window, weighing.slopes is not None):
            out[group.row_index] = _attend_group(q, keys, values, group, scale, weighing)[group.source]
        return out

    def _groups(self, window: int | None, distances: bool) -> list[Group]:
        found = self.groups.get((window, distances))
        if found is None:
            spans: dict[int, list[tuple[int, int]]] = defaultdict(list)
            sequence = self.rows.sequence
            starts = [0, *(np.flatnonzero(np.diff(sequence)) + 1).tolist(), len(sequence)]
            for first, last in pairwise(starts):
                spans[(last - first - 1).bit_length()].append((first, last))
            found = [_group(self.rows, group, self.cache, window, distances) for group in spans.values()]
            self.groups[window, distances] = found
        return found


class SdpaAttention:
    """`AttentionBackend` of any device and floating dtype."""

    def prepare(self, batch: Batch, cache: KVCache) -> SdpaPlan:
        return SdpaPlan(batch.rows, cache)


def _attend_group(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: Group, scale: float, weighing: Weighing
) -> torch.Tensor:
    """Result of the group's rows, [B * Q, H, D]."""
    (B, Q), (_, H, D) = group.rows.shape, q.shape
    Hk = keys.shape[1]
    query = q[group.rows].view(B, Q, Hk, H // Hk, D).permute(0, 2, 3, 1, 4).reshape(B, Hk, H // Hk * Q, D)
    k, v = (pool[group.slots].transpose(1, 2) for pool in (keys, values))  # [B, Hk, L, D]
    if weighing.softcap is None and weighing.slopes is None and weighing.sinks is None:
        mask = group.mask.repeat(1, 1, H // Hk, 1)
        out = scaled_dot_product_attention(query, k, v, attn_mask=mask, scale=scale)
    else:
        out = (_weights(query, k, group, scale, weighing) @ v.to(_wide(v.dtype))).to(q.dtype)
    return out.view(B, Hk, H // Hk, Q, D).permute(0, 3, 1, 2, 4).reshape(B * Q, H, D)


def _weights(query: torch.Tensor, k: torch.Tensor, group: Group, scale: float, weighing: Weighing) -> torch.Tensor:
    """Weights of the keys, [B, Hk, H / Hk * Q, L], in float32 at least."""
    B, Hk, folded, _ = query.shape
    Q, L, wide = group.mask.shape[2], k.shape[2], _wide(query.dtype)
    by_head = (1, Hk, folded // Q, 1, 1)
    scores = (query.to(wide) @ k.to(wide).transpose(2, 3)).mul_(scale).view(B, Hk, folded // Q, Q, L)
    if weighing.softcap is not None:
        scores.div_(weighing.softcap).tanh_().mul_(weighing.softcap)
    if weighing.slopes is not None and group.distance is not None:
        scores -= weighing.slopes.to(wide).view(by_head) * group.distance[:, None]
    scores.masked_fill_(~group.mask[:, None], -torch.inf)
    if weighing.sinks is not None:
        sinks = weighing.sinks.to(wide).view(by_head).expand(B, -1, -1, Q, 1)
        scores = torch.cat([scores, sinks], dim=-1)
    return scores.softmax(dim=-1)[..., :L].reshape(B, Hk, folded, L)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _group(
    rows: AttentionRows, spans: list[tuple[int, int]], cache: KVCache, window: int | None, distances: bool
) -> Group:
    """Index tensors of the sequences whose rows are `spans`."""
    B = len(spans)
    Q = max(last - first for first, last in spans)
    columns = [_columns(rows, first, last, window) for first, last in spans]
    L = max(len(slots) for slots, _, _ in columns)
    index = np.zeros((B, Q), np.int64)
    slots = np.zeros((B, L), np.int64)
    mask = np.zeros((B, 1, Q, L), np.bool_)
    distance = np.zeros((B, 1, Q, L), np.int64)
    for b, ((first, last), (own, seen, behind)) in enumerate(zip(spans, columns, strict=True)):
        index[b] = np.minimum(np.arange(first, first + Q), last - 1)
        slots[b, : len(own)] = own
        for table, known in ((mask, seen), (distance, behind)):
            table[b, 0, : last - first, : len(own)] = known
            table[b, 0, last - first :] = table[b, 0, last - first - 1]
    source = np.concatenate([b * Q + np.arange(last - first) for b, (first, last) in enumerate(spans)])

    def ready(array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(cache.shape.device)

    return Group(
        ready(index),
        ready(slots),
        ready(mask),
        ready(index.reshape(-1)[source]),
        ready(source),
        ready(distance) if distances else None,
    )


def _columns(
    rows: AttentionRows, first: int, last: int, window: int | None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    """Slots of the keys of one sequence, prefix and then tails; which of them each row sees, and how far behind it."""
    prefix = rows.prefix_lens[first:last]
    tails = np.diff(rows.tail_indptr[first : last + 1])
    own = prefix + tails - 1
    begin = 0 if window is None else max(0, int(own.min()) + 1 - window)
    positions = np.arange(begin, max(begin, int(prefix.max())))
    table, size = rows.block_tables[rows.sequence[first]], rows.block_size
    start, end = rows.tail_indptr[first], rows.tail_indptr[last]
    tail, inverse = np.unique(rows.tail_slots[start:end], return_inverse=True)
    seen = np.zeros((last - first, len(positions) + len(tail)), np.bool_)
    seen[:, : len(positions)] = positions < prefix[:, None]
    behind = np.zeros(seen.shape, np.int64)
    behind[:, : len(positions)] = own[:, None] - positions
    owner = np.repeat(np.arange(last - first), tails)
    seen[owner, len(positions) + inverse] = True
    depth = np.arange(end - start) - np.repeat(rows.tail_indptr[first:last] - start, tails)
    behind[owner, len(positions) + inverse] = tails[owner] - 1 - depth
    if window is not None:
        seen &= behind < window
    slots = table[positions // size].astype(np.int64) * size + positions % size
    return np.concatenate([slots, tail.astype(np.int64)]), seen, behind
