"""Output text while it grows, for stop strings."""

from __future__ import annotations

from dataclasses import dataclass

from workers.engine.api.request import Tokenizer

_UNFINISHED = "\ufffd"
_LONGEST_WINDOW = 32
"""Tokens that are decoded again at most while no character gets finished."""
_CHARACTER_TOKENS = 8
"""Tokens that an unfinished character lies in for certain: it has three bytes at most."""


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string that the newest token completed."""

    stop: str
    start: int
    """Where it begins in the text, which is cut there."""


class StopScanner:
    """Looks for stop strings in the text of one sequence, token by token.

    A match belongs to the token that finishes its last letter, and is reported for that token alone: one that the
    caller passes over is never found again. Of several that end with one token the first to end counts, and of those
    that end at the same letter the longest, as if the text had come letter by letter.

    Only the last few tokens are decoded again for each new one. Text whose end is an unfinished character, which shows
    as U+FFFD, is taken up to there, however many of them there are.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
        self.text = ""
        """What is finished of the output."""
        self._tokenizer = tokenizer
        self._stop = stop
        self._window: list[int] = []
        """The last tokens: their text is that of the whole output from `_first` on."""
        self._first = 0
        self._settled = 0
        """Tokens of the window whose text is finished."""

    def push(self, token: int) -> StopMatch | None:
        """Take the next token; returns the stop string that is complete with it, if there is one."""
        self._window.append(token)
        tail = self._tokenizer.decode(self._window)
        before = len(self.text)
        self._grow(tail.rstrip(_UNFINISHED))
        if not tail.endswith(_UNFINISHED):
            # What came before it stays: a tokenizer may write the first token of a text in another way.
            settled, self._settled = self._settled, len(self._window) - self._settled
            self._forget(settled, tail)
        elif len(self._window) > _LONGEST_WINDOW:
            self._settled = 0
            self._forget(len(self._window) - _CHARACTER_TOKENS, tail)
        return self._match_ending_after(before)

    def _grow(self, finished: str) -> None:
        known = len(self.text) - self._first
        if len(finished) > known:
            # Letters that the window has lost since they were held back are U+FFFD for good.
            self.text += _UNFINISHED * max(0, -known) + finished[max(0, known) :]

    def _forget(self, count: int, tail: str) -> None:
        """Drop the window's first tokens; both texts, `tail` being that of before, end alike."""
        if count:
            self._window = self._window[count:]
            self._first += len(tail) - len(self._tokenizer.decode(self._window))

    def _match_ending_after(self, length: int) -> StopMatch | None:
        if len(self.text) == length:
            return None
        matches = []
        for stop in self._stop:
            start = self.text.find(stop, max(0, length - len(stop) + 1))
            if start >= 0:
                matches.append((start + len(stop), start, stop))
        if not matches:
            return None
        _, start, stop = min(matches)
        return StopMatch(stop, start)
