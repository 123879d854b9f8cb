"""Suffix decoding (Oliaro et al. 2024, arXiv 2411.04975): continue as this text, or finished ones of its job, went on.

The longer the match, the longer the draft.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from collections.abc import Sequence as Seq

from workers.engine.api.config import SpeculationConfig
from workers.engine.api.request import FinishReason
from workers.engine.kernels.cpu.suffixes import compile_kernels
from workers.engine.speculators.lookup.suffix_index import GrowingText, TextMemory
from workers.engine.speculators.speculator import Speculator, SpeculatorContext
from workers.engine.state.sequence import Sequence
from workers.engine.state.tree import EMPTY, DraftTree

_MAX_SCOPES = 4
"""Jobs whose outputs are remembered; the one used least recently is forgotten first."""


class SuffixSpeculator(Speculator):
    """One index per sequence over its own tokens, and one per scope over finished outputs; never across scopes."""

    name = "suffix"

    def __init__(self, config: SpeculationConfig) -> None:
        self._config = config
        self._own: dict[Sequence, GrowingText] = {}
        self._shared: OrderedDict[Hashable, TextMemory] = OrderedDict()

    @classmethod
    def create(cls, context: SpeculatorContext) -> SuffixSpeculator:
        compile_kernels()
        return cls(context.config.speculation)

    def max_nodes(self, length: int) -> int:
        return length

    def propose(self, seqs: Seq[Sequence], lengths: Seq[int]) -> list[DraftTree]:
        return [self._propose(seq, length) if length > 0 else EMPTY for seq, length in zip(seqs, lengths, strict=True)]

    def _propose(self, seq: Sequence, length: int) -> DraftTree:
        own = self._own.get(seq)
        if own is None:
            own = self._own[seq] = GrowingText(self._config.suffix_depth)
        own.extend(seq.tokens[own.num_tokens :])
        found = [
            index.continuation(
                seq.tokens,
                length,
                factor=self._config.suffix_factor,
                min_probability=self._config.suffix_min_probability,
            )
            for index in (own, self._shared.get(seq.request.scope))
            if index is not None
        ]
        best = max(found, key=lambda continuation: continuation.score)
        draft = []
        for token in best.tokens:
            if seq.ends_with(token):
                break
            draft.append(token)
        return DraftTree.chain(draft) if draft else EMPTY

    def release(self, seq: Sequence) -> None:
        self._own.pop(seq, None)
        if seq.finish_reason not in (None, FinishReason.ABORT):
            self._remember(seq)

    def _remember(self, seq: Sequence) -> None:
        shared = self._shared.get(seq.request.scope)
        if shared is None:
            shared = self._shared[seq.request.scope] = TextMemory(
                self._config.suffix_depth, self._config.suffix_memory_tokens
            )
            if len(self._shared) > _MAX_SCOPES:
                self._shared.popitem(last=False)
        self._shared.move_to_end(seq.request.scope)
        shared.add(seq.output)
