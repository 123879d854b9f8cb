"""Which texts can be tokenised and stored."""

from __future__ import annotations

from workers.errors import BadRow

NUL = "\x00"


def check_text(text: str, where: str) -> None:
    """Raises `BadRow` (invalid_text) for what no tokenizer or database takes: NUL and lone surrogates."""
    if NUL in text:
        raise BadRow("invalid_text", f"{where} holds a NUL character at position {text.index(NUL)}; remove it")
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        place = error.start
        message = f"{where} holds the lone surrogate {text[place]!r} at position {place}; remove it"
        raise BadRow("invalid_text", message) from error
