"""What followed the longest known suffix of a text, and how often: the memory behind suffix decoding.

Answers the question of a suffix tree, exactly, at a fixed cost per token (`kernels.suffixes`).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from workers.engine.kernels.cpu.contexts import SHORTEST
from workers.engine.kernels.cpu.suffixes import SuffixTree


@dataclass(frozen=True, slots=True)
class Continuation:
    tokens: tuple[int, ...]
    probabilities: tuple[float, ...]
    """Share of the matching occurrences that went on like this, up to each token."""
    match_length: int

    @property
    def score(self) -> float:
        """How many of the tokens are expected to be right."""
        return sum(self.probabilities)


class SuffixIndex:
    """Texts and where each of their suffixes of at most `max_depth` tokens occurred: 12 bytes per token."""

    def __init__(self, max_depth: int) -> None:
        self._tree = SuffixTree(max_depth)
        self._around = len(self._tree)
        self._end = 1
        self.num_tokens = 0
        """Tokens that are held, and one more for each text that is finished."""

    @property
    def nbytes(self) -> int:
        return self._tree.nbytes

    def continuation(self, context: Seq[int], length: int, *, factor: float, min_probability: float) -> Continuation:
        """What followed the longest known suffix of `context`: at most `length` tokens, and at most
        factor * match length, while at least `min_probability` of the occurrences agree."""
        match_length, total, tokens, counts = self._tree.follow(context, length, self._end)
        probabilities = [count / total for count in counts]
        limit = min(len(tokens), int(factor * match_length))
        while limit and probabilities[limit - 1] < min_probability:
            limit -= 1
        return Continuation(tuple(tokens[:limit]), tuple(probabilities[:limit]), match_length)

    @property
    def _capacity(self) -> int:
        return len(self._tree) - self._around

    def _grow(self, capacity: int) -> None:
        self._tree.grow(capacity + self._around)

    def _append(self, tokens: Seq[int]) -> None:
        self._end = self._tree.append(self._end, tokens)
        self.num_tokens += len(tokens)


class GrowingText(SuffixIndex):
    """One text from its first token on. Its own end is no match: nothing followed there yet."""

    def extend(self, tokens: Seq[int]) -> None:
        needed = self.num_tokens + len(tokens)
        if needed > self._capacity:
            self._grow(needed + needed // 2)
        self._append(tokens)


class TextMemory(SuffixIndex):
    """Finished texts; before `num_tokens` would exceed `max_tokens` the oldest are forgotten, as a whole."""

    def __init__(self, max_depth: int, max_tokens: int) -> None:
        super().__init__(max_depth)
        self._max_tokens = max_tokens
        self._oldest = self._end

    def add(self, tokens: Seq[int]) -> None:
        """Remember a text, unless it is longer than the memory, or so short that nothing follows a match."""
        needed = len(tokens) + 1
        if len(tokens) <= SHORTEST or needed > self._max_tokens:
            return
        self._make_room(self.num_tokens + needed)
        self._append(tokens)
        self._end = self._tree.finish(self._end)
        self.num_tokens += 1

    def _make_room(self, needed: int) -> None:
        # Only a full ring forgets, so one that grows has never come round: every token may stay where it is.
        if min(needed, self._max_tokens) > self._capacity:
            self._grow(min(needed + needed // 2, self._max_tokens))
        while needed > self._max_tokens:
            end = self._tree.remove(self._oldest)
            forgotten = (end - self._oldest) % len(self._tree) + 1
            self._oldest = (end + 1) % len(self._tree)
            self.num_tokens -= forgotten
            needed -= forgotten
