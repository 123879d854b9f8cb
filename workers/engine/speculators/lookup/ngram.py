"""Prompt lookup: what followed the last time that the text's end occurred in it (Saxena 2023; vLLM's `ngram`)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from workers.engine.speculators.speculator import Speculator, SpeculatorContext
from workers.engine.state.sequence import Sequence
from workers.engine.state.tree import EMPTY, DraftTree


@dataclass(slots=True)
class _Index:
    """Where each n-gram of a sequence ended last: n-gram -> position after it."""

    last_end: dict[tuple[int, ...], int] = field(default_factory=dict)
    indexed: int = 0
    """Ends below this are in the index."""


class NgramSpeculator(Speculator):
    """Longest matching suffix first; the most recent occurrence of it wins.

    The index grows with the tokens, a few dictionary entries for each, so a proposal costs the same at any context.
    """

    name = "ngram"

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        self._indexes: dict[Sequence, _Index] = {}

    @classmethod
    def create(cls, context: SpeculatorContext) -> NgramSpeculator:
        speculation = context.config.speculation
        return cls(speculation.ngram_min, speculation.ngram_max)

    def max_nodes(self, length: int) -> int:
        return length

    def propose(self, seqs: Seq[Sequence], lengths: Seq[int]) -> list[DraftTree]:
        return [self._propose(seq, length) if length > 0 else EMPTY for seq, length in zip(seqs, lengths, strict=True)]

    def _propose(self, seq: Sequence, length: int) -> DraftTree:
        start = self._match(seq)
        if start is None:
            return EMPTY
        distance = len(seq) - start
        draft: list[int] = []
        for step in range(length):
            # Past the end of the text the match continues into its own draft: a repetition goes on.
            token = seq.tokens[start + step] if step < distance else draft[step - distance]
            if seq.ends_with(token):
                break
            draft.append(token)
        return DraftTree.chain(draft) if draft else EMPTY

    def _match(self, seq: Sequence) -> int | None:
        """Position after the latest earlier occurrence of the longest known suffix."""
        index = self._indexes.setdefault(seq, _Index())
        self._extend(index, seq)
        for size in self._sizes:
            if size < len(seq):
                end = index.last_end.get(tuple(seq.tokens[-size:]))
                if end is not None:
                    return end
        return None

    def _extend(self, index: _Index, seq: Sequence) -> None:
        """Index every n-gram that ends before the last token, so that a suffix never matches itself."""
        tokens = seq.tokens
        for end in range(max(index.indexed, 1), len(tokens)):
            for size in self._sizes:
                if size <= end:
                    index.last_end[tuple(tokens[end - size : end])] = end
        index.indexed = len(tokens)

    def release(self, seq: Sequence) -> None:
        self._indexes.pop(seq, None)
