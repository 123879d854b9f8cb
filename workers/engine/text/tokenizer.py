"""Text to token ids and back: a thin, typed face over transformers tokenizers, and a byte tokenizer for tests."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any

from workers.engine.api.tokenizer import Message, Piece
from workers.engine.text.chat_template import ChatTemplate
from workers.engine.text.control_tokens import ChatText, ControlTokens
from workers.engine.text.token_bytes import TokenBytes, token_bytes


class HuggingFaceTokenizer:
    """`TextTokenizer` over a transformers tokenizer."""

    def __init__(self, tokenizer: Any, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._eos = eos_token_ids
        self._vocab_size = len(tokenizer)
        bos = tokenizer.bos_token_id
        self._adds_bos = bos is not None and list(tokenizer("", add_special_tokens=True)["input_ids"])[:1] == [bos]

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._eos

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def min_tokens(self, text: str) -> int:
        return self._token_bytes.min_tokens(text) if self._token_bytes is not None else 0

    @cached_property
    def _token_bytes(self) -> TokenBytes | None:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        return token_bytes(json.loads(backend.to_str()), self.pieces(), _byte_of_letter())

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str], *, special_tokens: bool = True) -> list[list[int]]:
        if not texts:
            return []
        encoded = self._tokenizer(list(texts), add_special_tokens=special_tokens, return_attention_mask=False)
        ids: list[list[int]] = list(encoded["input_ids"])
        for index, text in enumerate(texts):
            if isinstance(text, ChatText):
                if special_tokens:
                    raise ValueError("the text of a chat has its special tokens: encode it without those around it")
                ids[index] = self._control_tokens.encode(text)
        return [self._with_one_bos(tokens) for tokens in ids] if special_tokens and self._adds_bos else ids

    def _with_one_bos(self, tokens: list[int]) -> list[int]:
        """Without the BOS that was put before a text which begins with it."""
        bos = self._tokenizer.bos_token_id
        return tokens[1:] if tokens[:2] == [bos, bos] else tokens

    def pieces(self) -> list[Piece]:
        special = {token.content for token in self._tokenizer.added_tokens_decoder.values() if token.special}
        plain = {token.content for token in self._tokenizer.added_tokens_decoder.values() if not token.special}
        is_byte_level = "ByteLevel" in _parts(self._tokenizer, "decoder")
        vocab: dict[str, int] = self._tokenizer.get_vocab()
        pieces: list[Piece] = [None] * (1 + max(vocab.values(), default=-1))
        for name, token in vocab.items():
            if name in special:
                pieces[token] = name
            elif name in plain:
                pieces[token] = name.encode(errors="surrogatepass")
            else:
                pieces[token] = _byte_level(name) if is_byte_level else _with_markers(name)
        return pieces

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def render(self, messages: Sequence[Message], *, parse_content: bool = False) -> str:
        text = self._rendered(messages)
        return text if parse_content else self._control_tokens.located(text, messages, self._rendered)

    def _rendered(self, messages: Sequence[Message]) -> str:
        return self._template.render(messages, self._tokenizer.special_tokens_map)

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self._tokenizer.get_chat_template())

    @cached_property
    def _control_tokens(self) -> ControlTokens:
        """The special tokens, and those others that the chat template writes or the tokenizer lists."""
        added = self._tokenizer.added_tokens_decoder.items()
        listed = getattr(self._tokenizer, "chat_control_tokens", None)
        written = self._template.literals if listed is None else listed
        ids = {
            token.content: token_id
            for token_id, token in added
            if token.content and (token.special or (token.content.strip() and token.content in written))
        }
        return ControlTokens(ids, getattr(self._tokenizer, "backend_tokenizer", None))


def _parts(tokenizer: Any, stage: str) -> set[str]:
    """Kinds of the parts that a stage of a tokenizer's pipeline is made of."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    state = json.loads(backend.to_str())[stage] if backend is not None else None
    if state is None:
        return set()
    inner = state.get("decoders") or state.get("pretokenizers") or ()
    return {state["type"], *(part["type"] for part in inner)}


@cache
def _byte_of_letter() -> dict[str, int]:
    """GPT-2's letters for bytes: printable ones stand for themselves, the others for letters from 256 on, in order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(256 + index): byte for index, byte in enumerate(others)}


def _byte_level(name: str) -> bytes:
    letters = _byte_of_letter()
    if all(letter in letters for letter in name):
        return bytes(letters[letter] for letter in name)
    return name.encode(errors="surrogatepass")


def _with_markers(name: str) -> bytes:
    """SentencePiece's way: "▁" for a space, "<0x0A>" for a byte."""
    if match := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", name):
        return bytes.fromhex(match[1])
    return name.replace("▁", " ").encode(errors="surrogatepass")


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

    def min_tokens(self, text: str) -> int:
        return len(text.encode(errors="surrogatepass"))

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str], *, special_tokens: bool = True) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def pieces(self) -> list[Piece]:
        return [*(bytes((byte,)) for byte in range(256)), "<eos>"]

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(t for t in token_ids if t < 256).decode(errors="replace")

    def render(self, messages: Sequence[Message], *, parse_content: bool = False) -> str:
        # No text spells the token that ends the answer.
        return "".join(f"<{m['role']}>{m['content']}\n" for m in messages) + "<assistant>"
