"""Text to token ids and back: a thin, typed face over transformers tokenizers, and a byte tokenizer for tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

Message = Mapping[str, str]


class TextTokenizer(Protocol):
    """What the engine and the workers need of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_token_ids(self) -> frozenset[int]: ...
    @property
    def has_chat_template(self) -> bool: ...
    def encode(self, text: str) -> list[int]:
        """Token ids with the special tokens that the model expects around a raw prompt."""
        ...

    def encode_batch(self, texts: Sequence[str], *, special_tokens: bool = True) -> list[list[int]]: ...
    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids, special tokens left out; an unfinished character shows as U+FFFD."""
        ...

    def render(self, messages: Sequence[Message]) -> str:
        """The chat template's text for the messages, ready for the answer. Raises what the template raises."""
        ...


class HuggingFaceTokenizer:
    """`TextTokenizer` over a transformers tokenizer."""

    def __init__(self, tokenizer: Any, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._eos = eos_token_ids
        self._vocab_size = len(tokenizer)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._eos

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str], *, special_tokens: bool = True) -> list[list[int]]:
        if not texts:
            return []
        encoded = self._tokenizer(list(texts), add_special_tokens=special_tokens, return_attention_mask=False)
        return list(encoded["input_ids"])

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def render(self, messages: Sequence[Message]) -> str:
        text: str = self._tokenizer.apply_chat_template(
            [dict(m) for m in messages], tokenize=False, add_generation_prompt=True
        )
        return text


class ByteTokenizer:
    """Every UTF-8 byte is a token; 256 ends the text. For scripted models, tests and benchmarks of everything else."""

    EOS = 256

    def __init__(self, vocab_size: int = 257) -> None:
        if vocab_size < 257:
            raise ValueError(f"a byte vocabulary needs 257 ids, got {vocab_size}")
        self._vocab_size = vocab_size

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset((self.EOS,))

    @property
    def has_chat_template(self) -> bool:
        return True

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str], *, special_tokens: bool = True) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(t for t in token_ids if t < 256).decode(errors="replace")

    def render(self, messages: Sequence[Message]) -> str:
        return "".join(f"<{m['role']}>{m['content']}\n" for m in messages) + "<assistant>"
