"""The KV cache: a pool of blocks, block tables per sequence, reserve before and commit after.

Invariants, with `n` = num_cached of a sequence:
    [0, n)              computed from verified tokens; valid for attention
    [n, capacity)       reserved; provisional until `commit`
    behind a window     blocks that no layer reads any more are freed; the table names the scratch block instead
    block 0             scratch: padding rows write here, and it is never read
Every block is scratch, free, or held by at least one sequence; `check()` proves it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from hashlib import blake2b

import torch

from workers.engine.state.sequence import Sequence

SCRATCH_BLOCK = 0
FINAL = -1
"""Names the hidden state after the final norm, which the language model head reads."""


@dataclass(slots=True)
class CachedSequence:
    """What the cache knows of one sequence."""

    blocks: list[int] = field(default_factory=list)
    num_cached: int = 0
    num_released: int = 0
    """Leading blocks that were freed, being behind every window."""
    num_hashed: int = 0
    """Leading blocks that are registered for prefix reuse."""
    prefix_digest: bytes = b""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """A layer's pools of keys and of values are [num_blocks * block_size, num_kv_heads, head_dim]."""

    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class CacheShape:
    layers: tuple[LayerShape, ...]
    dtype: torch.dtype
    device: torch.device
    hidden_size: int = 0
    """Width of the residual stream."""
    window: int | None = None
    """Positions that a row looks back on, its own included, in whichever layer sees most; None: in one it sees all."""

    @classmethod
    def uniform(
        cls,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        hidden_size: int = 0,
        window: int | None = None,
    ) -> CacheShape:
        """The shape of a model whose layers all have these sizes."""
        return cls((LayerShape(num_kv_heads, head_dim),) * num_layers, dtype, device, hidden_size, window)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def bytes_per_token(self) -> int:
        return 2 * sum(layer.num_kv_heads * layer.head_dim for layer in self.layers) * self.dtype.itemsize


class KVCache:
    """Block pool and tables of one model. Target and draft model have one each."""

    def __init__(
        self, shape: CacheShape, num_blocks: int, block_size: int, *, prefix_reuse: bool = True, shift: int = 0
    ) -> None:
        self.shape = shape
        self.shift = shift
        """Entry i is computed from the tokens up to i + shift: 0, or 1 for drafters that pair the feature of a token
        with the token after it. Positions and counts in this class are those of entries."""
        self.block_size = block_size
        self._prefix_reuse = prefix_reuse
        self.resize(num_blocks)

    def resize(self, num_blocks: int) -> None:
        """Begin anew with this many blocks, empty, and without hidden states."""
        self.num_blocks = num_blocks
        slots = (num_blocks + 1) * self.block_size
        self.keys = [self._pool(slots, layer) for layer in self.shape.layers]
        self.values = [self._pool(slots, layer) for layer in self.shape.layers]
        self.hidden: dict[int, torch.Tensor] = {}
        """Layer -> [slots, hidden_size]: the residual stream entering that layer, or FINAL. Kept where
        keys and values are kept, so a preempted or shared prefix never leaves a feature to be guessed."""
        self._tables: dict[Sequence, CachedSequence] = {}
        self._references = [0] * (num_blocks + 1)
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(1, num_blocks + 1))
        self._block_of_digest: dict[bytes, int] = {}
        self._digest_of_block: dict[int, bytes] = {}
        self.num_reused_tokens = 0

    def _pool(self, slots: int, layer: LayerShape) -> torch.Tensor:
        shape = (slots, layer.num_kv_heads, layer.head_dim)
        return torch.zeros(shape, dtype=self.shape.dtype, device=self.shape.device)

    def keep_hidden(self, layers: Iterable[int]) -> None:
        """Have passes keep the hidden states of these layers too, for drafters that read features."""
        slots = (self.num_blocks + 1) * self.block_size
        for layer in layers:
            shape = (slots, self.shape.hidden_size)
            self.hidden[layer] = torch.zeros(shape, dtype=self.shape.dtype, device=self.shape.device)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def holds(self, seq: Sequence) -> bool:
        return seq in self._tables

    def num_cached(self, seq: Sequence) -> int:
        cached = self._tables.get(seq)
        return cached.num_cached if cached else 0

    def block_table(self, seq: Sequence) -> list[int]:
        return self._tables[seq].blocks

    # ---------------------------------------------------------------- reserve

    def open(self, seq: Sequence) -> int:
        """Start caching a sequence, taking over blocks of a known prefix; returns how many tokens that saves.

        At least one token stays to be computed, since its logits are needed.
        """
        cached = self._tables[seq] = CachedSequence()
        if not self._prefix_reuse:
            return 0
        limit = max(0, len(seq) - 1 - self.shift) // self.block_size
        for index in range(limit):
            digest = self._digest(cached.prefix_digest, seq, index)
            block = self._block_of_digest.get(digest)
            if block is None:
                break
            self._hold(block)
            cached.blocks.append(block)
            cached.prefix_digest = digest
        cached.num_hashed = len(cached.blocks)
        cached.num_cached = cached.num_hashed * self.block_size
        self.num_reused_tokens += cached.num_cached
        return cached.num_cached

    def reserve(self, seq: Sequence, num_tokens: int) -> bool:
        """Make room for `num_tokens` tokens in all; False, and nothing changed, when the pool is too full."""
        cached = self._tables[seq]
        missing = self.blocks_for(num_tokens) - len(cached.blocks)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            # The block that was freed first: its prefix is the least likely to be asked for again.
            block, _ = self._free.popitem(last=False)
            self._forget_digest(block)
            self._references[block] = 1
            cached.blocks.append(block)
        return True

    def room(self, seq: Sequence) -> int:
        """Tokens that `seq` could hold in all, counting the free blocks."""
        return (len(self._tables[seq].blocks) + len(self._free)) * self.block_size

    def slot(self, seq: Sequence, position: int) -> int:
        return self._tables[seq].blocks[position // self.block_size] * self.block_size + position % self.block_size

    def announce(self, seq: Sequence, end: int) -> None:
        """Tell the prefix index that the coming pass computes the entries up to `end`, all of verified tokens.

        Sequences admitted to that same pass may share these blocks already: a pass writes the keys and values of all
        its rows before any of them is read.
        """
        if not self._prefix_reuse:
            return
        cached = self._tables[seq]
        while (cached.num_hashed + 1) * self.block_size <= end:
            digest = self._digest(cached.prefix_digest, seq, cached.num_hashed)
            block = cached.blocks[cached.num_hashed]
            known = digest in self._block_of_digest or block in self._digest_of_block
            if not known and block != SCRATCH_BLOCK:
                self._block_of_digest[digest] = block
                self._digest_of_block[block] = digest
            cached.prefix_digest = digest
            cached.num_hashed += 1

    # ----------------------------------------------------------------- commit

    def commit(self, seq: Sequence, num_cached: int) -> None:
        """Declare the first `num_cached` positions valid; what lies behind becomes provisional again.

        Where every layer has a window, the blocks wholly before that of the next row, at position `num_cached`, go back
        to the pool. Never with hidden states: drafters that lag behind read old ones.
        """
        cached = self._tables[seq]
        cached.num_cached = num_cached
        if self.shape.window is None or self.hidden:
            return
        passed = max(0, num_cached + 1 - self.shape.window) // self.block_size
        while cached.num_released < passed:
            self._let_go(cached.blocks[cached.num_released])
            cached.blocks[cached.num_released] = SCRATCH_BLOCK
            cached.num_released += 1

    def gather_paths(self, moves: Seq[tuple[Sequence, int, Seq[int]]]) -> None:
        """Move the KV of accepted tree paths to their canonical slots.

        Each move is (sequence, first, path): node i of the tree was written at position first + i, and the d-th node
        of the path belongs at first + d. Keys are rotated by depth already, so a copy is enough.
        """
        source: list[int] = []
        target: list[int] = []
        for seq, first, path in moves:
            for depth, node in enumerate(path):
                if node != depth:
                    source.append(self.slot(seq, first + node))
                    target.append(self.slot(seq, first + depth))
        if not source:
            return
        src = torch.tensor(source, device=self.shape.device)
        dst = torch.tensor(target, device=self.shape.device)
        for pool in (*self.keys, *self.values, *self.hidden.values()):
            pool[dst] = pool[src]

    # ------------------------------------------------------------------- free

    def free(self, seq: Sequence) -> None:
        """Free all blocks of a sequence. Full ones can still be found as a prefix until they are reused."""
        cached = self._tables.pop(seq, None)
        if cached is None:
            return
        # Backwards: a prefix is found from its beginning, so its end should be reused first.
        for block in reversed(cached.blocks[cached.num_released :]):
            self._let_go(block)

    def _let_go(self, block: int) -> None:
        self._references[block] -= 1
        if self._references[block] == 0:
            self._free[block] = None
            if block not in self._digest_of_block:
                # No prefix can be found in it: reuse it before blocks that still may serve one.
                self._free.move_to_end(block, last=False)

    def check(self) -> None:
        """Raise AssertionError unless free + used = all and every reference is accounted for."""
        held = [0] * (self.num_blocks + 1)
        for cached in self._tables.values():
            blocks = cached.blocks[cached.num_released :]
            assert set(cached.blocks[: cached.num_released]) <= {SCRATCH_BLOCK}, "a block that was given back is held"
            assert len(set(blocks)) == len(blocks), "a block table repeats a block"
            assert cached.num_cached <= len(cached.blocks) * self.block_size, "cached beyond what is reserved"
            for block in blocks:
                held[block] += 1
        assert held[SCRATCH_BLOCK] == 0, "a sequence holds the scratch block"
        assert held == self._references, "reference counts differ from the block tables"
        for block in range(1, self.num_blocks + 1):
            assert (held[block] == 0) == (block in self._free), f"block {block} is lost or held and free at once"
        for digest, block in self._block_of_digest.items():
            assert self._digest_of_block.get(block) == digest, "prefix index points at a reused block"

    # ----------------------------------------------------------- prefix reuse

    def _digest(self, previous: bytes, seq: Sequence, index: int) -> bytes:
        """Names a block by all tokens up to its end. 128 bits: a collision would change tokens."""
        start = index * self.block_size
        tokens = array("q", seq.tokens[start : start + self.block_size + self.shift]).tobytes()
        return blake2b(previous + tokens, digest_size=16).digest()

    def _hold(self, block: int) -> None:
        self._free.pop(block, None)
        self._references[block] += 1

    def _forget_digest(self, block: int) -> None:
        digest = self._digest_of_block.pop(block, None)
        if digest is not None:
            del self._block_of_digest[digest]
