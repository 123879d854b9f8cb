"""Where in known text a suffix occurred before, and what followed: the structure behind suffix decoding.

Answers the question of a suffix tree (which tokens followed the longest known suffix, and how often) from a hash index
of short n-grams into the texts, which costs a fixed amount per token and forgets whole texts when it is full.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

ANCHOR = 2
"""Length of the indexed n-grams: the shortest match, tokens."""
_OCCURRENCES = 32
"""Latest occurrences kept for each n-gram."""


@dataclass(slots=True, eq=False)
class Text:
    tokens: Seq[int]
    indexed: int = ANCHOR
    anchors: set[tuple[int, ...]] = field(default_factory=set)


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
    """Occurrences of n-grams over texts. A text may still grow at its end; `extend` indexes what came."""

    def __init__(self, max_depth: int, max_tokens: int | None = None) -> None:
        self._max_depth = max_depth
        self._max_tokens = max_tokens
        self._places: dict[tuple[int, ...], deque[tuple[Text, int]]] = {}
        self._texts: OrderedDict[int, Text] = OrderedDict()
        self.num_tokens = 0

    def add(self, tokens: Seq[int]) -> Text:
        """Take a text in, and the oldest ones out while there are more than `max_tokens` tokens."""
        text = Text(tokens)
        self._texts[id(text)] = text
        self.extend(text)
        self.num_tokens += len(tokens)
        while self._max_tokens is not None and self.num_tokens > self._max_tokens and self._texts:
            self._forget(self._texts.popitem(last=False)[1])
        return text

    def extend(self, text: Text) -> None:
        """Index every n-gram that ends before the text's last token, so that its own suffix is no match."""
        tokens = text.tokens
        for end in range(text.indexed, len(tokens)):
            anchor = tuple(tokens[end - ANCHOR : end])
            places = self._places.get(anchor)
            if places is None:
                places = self._places[anchor] = deque(maxlen=_OCCURRENCES)
            places.append((text, end))
            text.anchors.add(anchor)
        text.indexed = max(text.indexed, len(tokens))

    def _forget(self, text: Text) -> None:
        for anchor in text.anchors:
            places = self._places.get(anchor)
            if places is None:
                continue
            kept = [place for place in places if place[0] is not text]
            if kept:
                self._places[anchor] = deque(kept, maxlen=_OCCURRENCES)
            else:
                del self._places[anchor]
        self.num_tokens -= len(text.tokens)

    def continuation(self, context: Seq[int], length: int, *, factor: float, min_probability: float) -> Continuation:
        """What followed the longest known suffix of `context`: at most `length` tokens, and at most
        factor * match length, while at least `min_probability` of the occurrences agree."""
        group, match_length = self._longest_matches(context)
        limit = min(length, int(factor * match_length))
        tokens: list[int] = []
        probabilities: list[float] = []
        total = len(group)
        while len(tokens) < limit:
            step = len(tokens)
            followers = [(text.tokens[end + step], text, end) for text, end in group if end + step < len(text.tokens)]
            if not followers:
                break
            # Counter keeps first-seen order among equals, and the latest occurrence comes first.
            token, count = Counter(follower[0] for follower in followers).most_common(1)[0]
            if count / total < min_probability:
                break
            tokens.append(token)
            probabilities.append(count / total)
            group = [(text, end) for follower, text, end in followers if follower == token]
        return Continuation(tuple(tokens), tuple(probabilities), match_length)

    def _longest_matches(self, context: Seq[int]) -> tuple[list[tuple[Text, int]], int]:
        if len(context) < ANCHOR:
            return [], 0
        best, longest = [], 0
        for text, end in reversed(self._places.get(tuple(context[-ANCHOR:]), ())):
            length = self._match_length(text.tokens, end, context)
            if length > longest:
                best, longest = [(text, end)], length
            elif length == longest:
                best.append((text, end))
        return best, longest

    def _match_length(self, tokens: Seq[int], end: int, context: Seq[int]) -> int:
        length = ANCHOR
        limit = min(self._max_depth, end, len(context))
        while length < limit and tokens[end - 1 - length] == context[-1 - length]:
            length += 1
        return length
