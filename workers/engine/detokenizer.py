"""Output text while it grows, for stop strings."""

from __future__ import annotations

from workers.engine.request import Tokenizer

_UNFINISHED = "\ufffd"


class StopScanner:
    """Looks for stop strings in the text of one sequence, token by token.

    Only the last few tokens are decoded again for each new one, and a character that is not finished yet is held back.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._longest = max(map(len, stop))
        self._ids: list[int] = []
        self._prefix = 0
        self._read = 0
        self.text = ""

    def push(self, token: int) -> int | None:
        """Take the next token; returns where the text is to be cut when a stop string is complete now."""
        self._ids.append(token)
        known = self._tokenizer.decode(self._ids[self._prefix : self._read])
        text = self._tokenizer.decode(self._ids[self._prefix :])
        if len(text) <= len(known) or text.endswith(_UNFINISHED):
            return None
        start = max(0, len(self.text) - self._longest + 1)
        self.text += text[len(known) :]
        self._prefix, self._read = self._read, len(self._ids)
        return self._find(start)

    def _find(self, start: int) -> int | None:
        found = [at for at in (self.text.find(stop, start) for stop in self._stop) if at >= 0]
        return min(found, default=None)
