"""Several speculators side by side: requests of one batch may each name their own."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any

from workers.engine.speculators.speculator import LoadedDraft, Speculator
from workers.engine.state.kv_cache import KVCache
from workers.engine.state.sequence import Sequence
from workers.engine.state.tree import EMPTY, DraftTree
from workers.engine.verifier import Verdict


class MixedSpeculator:
    """Hands each sequence to the speculator that its request names; the first one is the default."""

    def __init__(self, speculators: Mapping[str, Speculator]) -> None:
        self._speculators = dict(speculators)
        self._default = next(iter(self._speculators))
        self.name = self._default
        self.hidden_layers = tuple({layer for s in self._speculators.values() for layer in s.hidden_layers})

    def method_of(self, seq: Sequence) -> str:
        return seq.request.method or self._default

    @property
    def draft(self) -> LoadedDraft | None:
        """What was loaded beside the target: by one speculator at most, as the options of a draft are shared."""
        return next((one.draft for one in self._speculators.values() if one.draft is not None), None)

    @property
    def caches(self) -> list[KVCache]:
        """Those that speculators have of their own."""
        return [one.cache for one in self._speculators.values() if one.cache is not None]

    @property
    def depth(self) -> int | None:
        """Of the draft that decides it, if there is one."""
        return next((one.depth for one in self._speculators.values() if one.depth is not None), None)

    @property
    def details(self) -> dict[str, Any]:
        """What files decided, of all of them."""
        return {name: value for one in self._speculators.values() for name, value in one.details.items()}

    def max_nodes(self, length: int) -> int:
        return max(speculator.max_nodes(length) for speculator in self._speculators.values())

    def propose(self, seqs: Seq[Sequence], lengths: Seq[int]) -> list[DraftTree]:
        trees: dict[Sequence, DraftTree] = {}
        for method, speculator in self._speculators.items():
            mine = [(seq, n) for seq, n in zip(seqs, lengths, strict=True) if n > 0 and self.method_of(seq) == method]
            if mine:
                chosen, wanted = zip(*mine, strict=True)
                trees.update(zip(chosen, speculator.propose(chosen, wanted), strict=True))
        return [trees.get(seq, EMPTY) for seq in seqs]

    def update(self, verdicts: Seq[Verdict]) -> None:
        for method, speculator in self._speculators.items():
            mine = [verdict for verdict in verdicts if self.method_of(verdict.seq) == method]
            if mine:
                speculator.update(mine)

    def release(self, seq: Sequence) -> None:
        self._speculators[self.method_of(seq)].release(seq)
