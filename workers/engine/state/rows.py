"""Which keys the query rows of a step attend to, and how a layer weighs them; the same for every device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Weighing:
    """How a layer weighs the keys of a row, beyond softmax(scale * q k^T)."""

    window: int | None = None
    """A row sees the last so many positions, its own included; None: all of them."""
    softcap: float | None = None
    """A score s becomes softcap * tanh(s / softcap)."""
    slopes: torch.Tensor | None = None
    """[H] (ALiBi): a key d positions back has slope * d taken off its score."""
    sinks: torch.Tensor | None = None
    """[H] scores, one per head, that take part in the softmax without a value."""

    @property
    def is_plain(self) -> bool:
        return self.window is None and self.softcap is None and self.slopes is None and self.sinks is None


PLAIN = Weighing()


@dataclass(frozen=True, eq=False)
class AttentionRows:
    """Which keys each of T query rows attends to; built once per step and used by every layer.

    Row t reads `prefix_lens[t]` keys through the block table of its sequence (logical positions 0, 1, ...), then the
    slots `tail_slots[tail_indptr[t]:tail_indptr[t + 1]]`, root side first. A row of a chain at position p has
    prefix_lens = p + 1 and no tail; a node of a draft tree has the committed length and its path down to itself.
    A row without any key (padding) gets zeros. Adjacent rows of one sequence share the loads of their keys.

    Slots are not checked against the pool: a wrong table reads foreign memory.
    """

    sequence: Int32Array  # [T] row of block_tables
    prefix_lens: Int32Array  # [T]
    tail_indptr: Int32Array  # [T + 1]
    tail_slots: Int32Array  # [tail_indptr[T]]
    block_tables: Int32Array  # [B, max_blocks]; slot = block * block_size + offset
    block_size: int

    def __post_init__(self) -> None:
        for name in ("sequence", "prefix_lens", "tail_indptr", "tail_slots", "block_tables"):
            array = getattr(self, name)
            if array.dtype != np.int32 or not array.flags.c_contiguous:
                raise TypeError(f"{name} must be a contiguous int32 array, not {array.dtype}")
        rows = len(self.sequence)
        if len(self.prefix_lens) != rows or len(self.tail_indptr) != rows + 1 or self.block_tables.ndim != 2:
            raise ValueError("sequence and prefix_lens need T entries, tail_indptr T + 1, block_tables two dimensions")
        if self.tail_indptr[-1] > len(self.tail_slots):
            raise ValueError("tail_indptr points past tail_slots")
        if rows and self.prefix_lens.max() > self.block_tables.shape[1] * self.block_size:
            raise ValueError("a prefix is longer than its block table")

    @cached_property
    def num_keys(self) -> int:
        """Keys of all rows together."""
        return int(self.prefix_lens.sum()) + int(self.tail_indptr[-1])
