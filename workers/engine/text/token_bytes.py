"""How much text one token can stand for: it bounds a prompt's tokens from below before the prompt is tokenised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

_SHRINKING = {"NFC": 4, "NFD": 4, "NFKC": 16, "NFKD": 16, "Lowercase": 3, "Prepend": 1, "ByteLevel": 1}
"""Normalisers that drop nothing -> how many bytes they may make one of, rounded up: 9 bytes of Hangul become 3."""
_SPLITTERS = ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength")
"""Pre-tokenizers that keep every character; others do by their `behavior`."""


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """Bytes of text and tokens: `longest` bytes for each token, at most, apart from the bytes that are `unknown`."""

    longest: int
    unknown: bytes
    """Bytes that the vocabulary lacks; the tokenizer drops them."""

    def min_tokens(self, text: str) -> int:
        """Tokens that the text has at least."""
        return ceil(len(text.encode(errors="surrogatepass").translate(None, self.unknown)) / self.longest)


def token_bytes(
    pipeline: Mapping[str, Any], pieces: Sequence[bytes | str | None], letters: Mapping[str, int]
) -> TokenBytes | None:
    """How text and tokens go together, by the content of a tokenizer.json; None where there is no such bound.

    There is none where text may vanish (stripped accents, dropped spaces), or be of any length in one token (an unknown
    word, a special token that swallows the spaces beside it). `letters` names the bytes of a byte-level vocabulary.
    """
    shrinking = _shrinking(pipeline["normalizer"])
    unknown = _unknown_bytes(pipeline, letters)
    if (
        shrinking is None
        or unknown is None
        or not _keeps_text(pipeline["pre_tokenizer"])
        or any(token["lstrip"] or token["rstrip"] for token in pipeline["added_tokens"])
    ):
        return None
    longest = max((len(_bytes(piece)) for piece in pieces if piece is not None), default=1)
    return TokenBytes(max(shrinking * longest, 1), unknown)


def _bytes(piece: bytes | str) -> bytes:
    return piece if isinstance(piece, bytes) else piece.encode(errors="surrogatepass")


def _shrinking(normalizer: Mapping[str, Any] | None) -> int | None:
    """Bytes of a text for each byte of what the normaliser makes of it, at most."""
    if normalizer is None:
        return 1
    kind = normalizer["type"]
    if kind == "Sequence":
        parts = [_shrinking(part) for part in normalizer["normalizers"]]
        return None if None in parts else prod(part for part in parts if part is not None)
    if kind == "Replace":
        pattern, content = normalizer["pattern"].get("String"), normalizer["content"]
        return max(1, ceil(len(pattern.encode()) / len(content.encode()))) if pattern and content else None
    return _SHRINKING.get(kind)


def _keeps_text(pre_tokenizer: Mapping[str, Any] | None) -> bool:
    if pre_tokenizer is None:
        return True
    kind = pre_tokenizer["type"]
    if kind == "Sequence":
        return all(_keeps_text(part) for part in pre_tokenizer["pretokenizers"])
    if kind in ("Split", "Punctuation"):
        return bool(pre_tokenizer["behavior"] != "Removed")
    return kind in _SPLITTERS


def _unknown_bytes(pipeline: Mapping[str, Any], letters: Mapping[str, int]) -> bytes | None:
    """Bytes that no token stands for; None if what is unknown is not told byte by byte."""
    model = pipeline["model"]
    if model.get("type") not in ("BPE", "Unigram"):
        return None
    vocabulary = model["vocab"] if isinstance(model["vocab"], Mapping) else {entry[0] for entry in model["vocab"]}
    if _has_byte_level(pipeline["pre_tokenizer"]) or _has_byte_level(pipeline["normalizer"]):
        return bytes(byte for letter, byte in letters.items() if letter not in vocabulary)
    has_all = model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    return b"" if has_all else None


def _has_byte_level(stage: Mapping[str, Any] | None) -> bool:
    if stage is None:
        return False
    parts = stage.get("pretokenizers") or stage.get("normalizers") or ()
    return stage["type"] == "ByteLevel" or any(_has_byte_level(part) for part in parts)
