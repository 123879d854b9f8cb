"""Flat ragged tensors of one forward pass: everything that a model needs, in one value.

Rows of all sequences lie one after the other, nothing is padded to the longest. The rows of a sequence are the tokens
that its cache lacks, in order, and then the nodes of its draft tree; the last token's row is the tree's root.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from workers.engine.state.kv_cache import SCRATCH_BLOCK, KVCache
from workers.engine.state.rows import AttentionRows
from workers.engine.state.sequence import Sequence
from workers.engine.state.tree import EMPTY, ROOT, DraftTree

MIN_ROWS = 4
"""Below this, GEMM kernels sum in another order and a row's value depends on the row count (fp32)."""


@dataclass(frozen=True, slots=True)
class Feed:
    """What one sequence feeds into a pass: tokens[start:end], then nodes[first_node:] of its tree. Into a cache with a
    shift it feeds tokens[start + shift:end + shift].

    Nodes before `first_node` are in the cache already. With `end` short of the sequence the pass is a prompt chunk,
    and the tree is empty.
    """

    seq: Sequence
    start: int
    end: int
    tree: DraftTree = EMPTY
    first_node: int = 0
    logits: bool = True
    """Whether the last token's row and the tree's rows need logits."""

    @property
    def num_rows(self) -> int:
        return self.end - self.start + len(self.tree) - self.first_node


@dataclass(frozen=True, slots=True)
class Batch:
    """T rows over B sequences, R of them with logits."""

    input_ids: torch.Tensor
    """[T] int64"""
    positions: torch.Tensor
    """[T] int64: position in the sequence; a node's is that of its depth."""
    slots: torch.Tensor
    """[T] int64: where each row's keys and values are written."""
    rows: AttentionRows
    """Which keys each row sees."""
    logits_rows: torch.Tensor
    """[R] int64: rows that need logits."""
    logits_offsets: tuple[int, ...]
    """Per feed: index in [0, R) of its first logits row: the root's, or the first fed node's."""
    num_rows: int
    """Rows that count; the rest of T is padding in the scratch block."""

    @classmethod
    def pack(cls, feeds: Seq[Feed], cache: KVCache) -> Batch:
        packer = _Packer(cache)
        for feed in feeds:
            packer.add(feed)
        return packer.finish()


class _Packer:
    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._block_size = cache.block_size
        self._shift = cache.shift
        self._ids: list[int] = []
        self._positions: list[int] = []
        self._slots: list[int] = []
        self._sequence: list[int] = []
        self._prefix: list[int] = []
        self._tail_indptr: list[int] = [0]
        self._tail: list[int] = []
        self._tables: list[list[int]] = []
        self._logits_rows: list[int] = []
        self._offsets: list[int] = []

    def add(self, feed: Feed) -> None:
        table = self._cache.block_table(feed.seq)
        index = len(self._tables)
        self._tables.append(table)
        self._offsets.append(len(self._logits_rows))
        self._add_tokens(feed, table, index)
        if feed.logits and feed.end > feed.start:
            self._logits_rows.append(len(self._ids) - 1)
        if len(feed.tree) > feed.first_node:
            self._add_nodes(feed, table, index)

    def _add_tokens(self, feed: Feed, table: list[int], index: int) -> None:
        count = feed.end - feed.start
        size = self._block_size
        positions = range(feed.start, feed.end)
        self._ids.extend(feed.seq.tokens[feed.start + self._shift : feed.end + self._shift])
        self._positions.extend(positions)
        self._slots.extend(table[p // size] * size + p % size for p in positions)
        self._sequence.extend([index] * count)
        self._prefix.extend(range(feed.start + 1, feed.end + 1))
        self._tail_indptr.extend([len(self._tail)] * count)

    def _add_nodes(self, feed: Feed, table: list[int], index: int) -> None:
        size, length = self._block_size, len(feed.seq) - self._shift
        first = length
        depths: list[int] = []
        # Node i sits at position first + i. While a path's nodes sit where a chain's would, the table alone finds them.
        canonical: list[bool] = []
        for node, (token, parent) in enumerate(zip(feed.tree.tokens, feed.tree.parents, strict=True)):
            depth = 1 if parent == ROOT else depths[parent] + 1
            depths.append(depth)
            canonical.append(node == depth - 1 and (parent == ROOT or canonical[parent]))
            if node < feed.first_node:
                continue
            position = first + node
            self._ids.append(token)
            self._positions.append(length - 1 + depth)
            self._slots.append(table[position // size] * size + position % size)
            self._sequence.append(index)
            if canonical[node]:
                self._prefix.append(length + depth)
            else:
                self._prefix.append(length)
                for ancestor in feed.tree.path(node):
                    place = first + ancestor
                    self._tail.append(table[place // size] * size + place % size)
            self._tail_indptr.append(len(self._tail))
            if feed.logits:
                self._logits_rows.append(len(self._ids) - 1)

    def finish(self) -> Batch:
        count = len(self._ids)
        self._pad_rows()
        logits = self._logits_rows + [count - 1] * max(0, MIN_ROWS - len(self._logits_rows))
        device = self._cache.shape.device
        rows = AttentionRows(
            sequence=np.array(self._sequence, dtype=np.int32),
            prefix_lens=np.array(self._prefix, dtype=np.int32),
            tail_indptr=np.array(self._tail_indptr, dtype=np.int32),
            tail_slots=np.array(self._tail, dtype=np.int32),
            block_tables=self._padded_tables(),
            block_size=self._block_size,
        )
        return Batch(
            input_ids=torch.tensor(self._ids, device=device),
            positions=torch.tensor(self._positions, device=device),
            slots=torch.tensor(self._slots, device=device),
            rows=rows,
            logits_rows=torch.tensor(logits, device=device),
            logits_offsets=tuple(self._offsets),
            num_rows=count,
        )

    def _pad_rows(self) -> None:
        missing = MIN_ROWS - len(self._ids)
        if missing <= 0:
            return
        self._sequence.extend([len(self._tables)] * missing)
        self._tables.append([SCRATCH_BLOCK])
        self._ids.extend([0] * missing)
        self._positions.extend([0] * missing)
        self._slots.extend([0] * missing)
        self._prefix.extend([1] * missing)
        self._tail_indptr.extend([len(self._tail)] * missing)

    def _padded_tables(self) -> NDArray[np.int32]:
        width = max(map(len, self._tables))
        tables = np.zeros((len(self._tables), width), dtype=np.int32)
        for row, table in enumerate(self._tables):
            tables[row, : len(table)] = table
        return tables
