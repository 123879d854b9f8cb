"""Prompts that cannot fit, found before they are tokenised as a whole: that takes a hundred times their size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from workers.engine.api.errors import PromptTooLong
from workers.engine.api.tokenizer import TextTokenizer
from workers.errors import BadRow

PREFIX_CHARACTERS = 1 << 16
"""A longer prompt is tokenised in beginnings first, from this length (or `PREFIX_PER_TOKEN`) on."""
PREFIX_PER_TOKEN = 16
"""Characters of the first beginning for each token of the context."""
GROUP_CHARACTERS = 1 << 20
"""Characters of the texts that are tokenised in one call."""
SIZE_PER_TOKEN = 4
"""Characters for each token of the context from which on a text is measured; shorter ones are tokenised as quickly."""
KEPT_ROLES = ("system", "developer", "user", "tool")
"""Templates write what these say, perhaps without the spaces around it; of an assistant they may leave out thoughts."""


class LengthLimit:
    """Tells texts that have no room in the context, from their size alone or from their beginning."""

    def __init__(self, tokenizer: TextTokenizer, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len

    def check_messages(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Raise `BadRow` (prompt_too_long) for messages that no template makes short enough."""
        kept = [message.get("content") for message in messages if message.get("role") in KEPT_ROLES]
        self._check_size([content.strip() for content in kept if isinstance(content, str)])

    def check(self, text: str) -> None:
        """Raise `BadRow` (prompt_too_long) for a text that cannot fit. One that passes may still be too long."""
        self._check_size([text])
        length = max(PREFIX_CHARACTERS, PREFIX_PER_TOKEN * self._max_model_len)
        while length < len(text):
            # What follows may change the last tokens of a beginning, not half of them.
            at_least = self._count(text[:length]) // 2
            if at_least >= self._max_model_len:
                raise self._too_long(f"over {at_least}")
            length *= 4

    def _check_size(self, texts: Sequence[str]) -> None:
        size = sum(map(len, texts))
        if size < SIZE_PER_TOKEN * self._max_model_len:
            return
        # Put together, texts may have fewer tokens than alone, by no more than rounding adds.
        at_least = sum(self._tokenizer.min_tokens(text) for text in texts) - len(texts)
        if at_least >= self._max_model_len:
            raise self._too_long(f"{size:,} characters, over {at_least}")

    def _count(self, text: str) -> int:
        with suppress(Exception):  # the whole text will say what is wrong with it
            return len(self._tokenizer.encode_batch([text], special_tokens=False)[0])
        return 0

    def _too_long(self, length: str) -> BadRow:
        message = f"the prompt has {length} tokens; the context of {self._max_model_len} has no room for an answer"
        return BadRow(PromptTooLong.code, message)


def in_groups(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """The texts in order, in groups of bounded size."""
    start = size = 0
    for place, text in enumerate(texts):
        if place > start and size + len(text) > GROUP_CHARACTERS:
            yield texts[start:place]
            start, size = place, 0
        size += len(text)
    if texts:
        yield texts[start:]
