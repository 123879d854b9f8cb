"""EAGLE layers put through passes by hand."""

from __future__ import annotations

import torch

from tests.support.drafts.weights import HIDDEN
from workers.engine.api.request import Request
from workers.engine.speculators.eagle.layer import EagleModel
from workers.engine.state.batch import Batch, Feed
from workers.engine.state.kv_cache import CacheShape, KVCache
from workers.engine.state.sequence import Sequence

FEATURES = CacheShape.uniform(6, 2, 8, torch.float32, torch.device("cpu"), HIDDEN)
NORMS = {
    f"fc_norm.{i}.weight": 1 + 0.2 * torch.randn(HIDDEN, generator=torch.Generator().manual_seed(i)) for i in range(3)
}
INPUT_NORM = {"input_norm.weight": 1 + 0.2 * torch.randn(3 * HIDDEN, generator=torch.Generator().manual_seed(9))}
AUX = {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]}


class Run:
    """Feeds entries and tree nodes of several sequences, and remembers the outputs."""

    def __init__(self, model: EagleModel) -> None:
        self.model = model
        self.cache = KVCache(model.cache_shape, 40, 4, shift=1)

    def open(self, index: int, tokens: list[int]) -> Sequence:
        seq = Sequence(Request(index, tokens), index, frozenset(), 256)
        self.cache.open(seq)
        assert self.cache.reserve(seq, len(seq) + 12)
        return seq

    def entries(self, feeds: list[Feed], features: dict[Sequence, torch.Tensor]) -> list[torch.Tensor]:
        rows = torch.cat([features[feed.seq][feed.start : feed.end] for feed in feeds])
        return self._forward(feeds, self.model.encode(rows))

    def nodes(self, feeds: list[Feed], parents: list[torch.Tensor]) -> list[torch.Tensor]:
        return self._forward(feeds, torch.cat(parents))

    def _forward(self, feeds: list[Feed], rows: torch.Tensor) -> list[torch.Tensor]:
        outputs = self.model.forward(Batch.pack(feeds, self.cache), rows, self.cache)
        return list(outputs.split([feed.num_rows for feed in feeds]))
