"""How the memory for keys and values is divided: the target's pools, its features, and what drafts keep."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from workers.engine.api.config import EngineConfig
from workers.engine.api.errors import InvalidConfig
from workers.engine.models.facts import ModelFacts
from workers.engine.models.loading.load import context_length
from workers.engine.state.kv_cache import CacheShape

log = logging.getLogger(__name__)

_FEWEST_BLOCKS = 2


@dataclass(frozen=True, slots=True)
class DraftMemory:
    """What a way of drafting keeps for every cached token."""

    hidden_layers: tuple[int, ...] = ()
    """Of the target: features in its own cache."""
    cache: CacheShape | None = None
    """Of a cache of its own, with as many blocks as the target's."""


@dataclass(frozen=True, slots=True)
class KVPlan:
    """Blocks of every pool, and the bytes of a token in each kind of pool."""

    num_blocks: int
    block_size: int
    target: int
    features: int
    draft: int

    @property
    def capacity(self) -> int:
        """Tokens that the pools hold."""
        return self.num_blocks * self.block_size

    @property
    def bytes(self) -> dict[str, int]:
        """What each kind of pool takes in all, one block of scratch included."""
        tokens = (self.num_blocks + 1) * self.block_size
        return {name: tokens * getattr(self, name) for name in ("target", "features", "draft")}


def plan_kv(config: EngineConfig, target: ModelFacts, drafts: Iterable[DraftMemory]) -> KVPlan:
    """Share `kv_memory` out, or give every pool `kv_blocks` blocks. Needs the target's sizes, not its weights.

    Raises `InvalidConfig` when `kv_memory` is too small for anything.
    """
    shape, drafts = target.cache_shape, list(drafts)
    layers = {layer for draft in drafts for layer in draft.hidden_layers}
    features = len(layers) * shape.hidden_size * shape.dtype.itemsize
    own = sum(draft.cache.bytes_per_token() for draft in drafts if draft.cache is not None)
    token = shape.bytes_per_token() + features + own
    blocks = config.kv_blocks or _affordable(config, context_length(config, target), token)
    return KVPlan(blocks, config.block_size, shape.bytes_per_token(), features, own)


def _affordable(config: EngineConfig, context: int, token: int) -> int:
    """As many blocks as `max_batch` sequences can use, where the memory is enough for these and one of scratch."""
    block = token * config.block_size
    useful = -(-config.max_batch * context // config.block_size)
    by_memory = config.kv_memory // block - 1
    if by_memory < min(useful, _FEWEST_BLOCKS):
        raise InvalidConfig(
            f"kv_memory of {config.kv_memory} bytes is too small: a block of {config.block_size} tokens takes {block}, "
            f"and {_FEWEST_BLOCKS + 1} are the least that runs; raise kv_memory"
        )
    return min(by_memory, useful)


def log_plan(plan: KVPlan) -> None:
    """Say how much memory goes where."""
    parts = ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in plan.bytes.items() if size)
    log.info("KV memory: %d blocks of %d tokens: %s", plan.num_blocks, plan.block_size, parts)
