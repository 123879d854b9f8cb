"""What an engine's tokenizer can do, whatever library it comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Message = Mapping[str, Any]
Piece = bytes | str | None
"""What a token id stands for: bytes of text, the name of a special token, or nothing."""


class TextTokenizer(Protocol):
    """What the engine and the workers need of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_token_ids(self) -> frozenset[int]: ...
    @property
    def has_chat_template(self) -> bool: ...
    def min_tokens(self, text: str) -> int:
        """Tokens that the text has at least, told without tokenising it; 0 where that cannot be told."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids with the special tokens that the model expects around a raw prompt."""
        ...

    def encode_batch(self, texts: Sequence[str], *, special_tokens: bool = True) -> list[list[int]]:
        """`special_tokens` puts those around each text that the model expects around a raw prompt."""
        ...

    def pieces(self) -> list[Piece]:
        """What each id stands for, from 0 to the last one that stands for something."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids, special tokens left out; an unfinished character shows as U+FFFD."""
        ...

    def render(self, messages: Sequence[Message], *, parse_content: bool = False) -> str:
        """The chat template's text for the messages, ready for the answer and for `encode_batch` without special
        tokens. What messages spell of control tokens is encoded as text, unless `parse_content`.

        Raises what the template raises, `TemplateLimit` when it takes too much, and `SpelledTokens`.
        """
        ...
