"""Windowed rates and an honest ETA, from counts read now and then."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

RATE_SECONDS = 30.0
ETA_SECONDS = 300.0
"""An ETA from a short window jumps: rows of one batch start together and tend to end together."""
MIN_SPAN_SECONDS = 2.0
"""Shorter spans say nothing: results arrive in batches about once a second."""


@dataclass(frozen=True, slots=True)
class Rates:
    """None: not known yet."""

    rows_per_second: float | None = None
    tokens_per_second: float | None = None
    eta_seconds: float | None = None


class _Sample(NamedTuple):
    seconds: float
    rows: int
    tokens: int


class RateWindow:
    """Rates over the last `rate_seconds`, ETA over the last `eta_seconds`: a resumed job is not credited with
    yesterday's rows, and a job that stands still says so. Tokens may be counted as they come, long before their row."""

    def __init__(self, rate_seconds: float = RATE_SECONDS, eta_seconds: float = ETA_SECONDS) -> None:
        self._rate_seconds = rate_seconds
        self._eta_seconds = eta_seconds
        self._samples: deque[_Sample] = deque()
        self._tokens = self._tokens_before = 0
        self._rows_moved = self._tokens_moved = False

    def add(self, seconds: float, rows: int, tokens: int) -> None:
        """Record counts read at `seconds` (monotonic). Tokens that fall are another engine's, which began anew."""
        self._tokens_before += max(0, self._tokens - tokens)
        self._tokens, tokens = tokens, tokens + self._tokens_before
        if self._samples:
            self._rows_moved |= rows > self._samples[-1].rows
            self._tokens_moved |= tokens > self._samples[-1].tokens
        self._samples.append(_Sample(seconds, rows, tokens))
        while len(self._samples) > 2 and self._samples[1].seconds <= seconds - self._eta_seconds:
            self._samples.popleft()

    def restart(self) -> None:
        """Forget the time before now (loading a model says nothing about rates)."""
        self._samples.clear()
        self._rows_moved = self._tokens_moved = False

    def rates(self, rows_left: int) -> Rates:
        """Rates now: none before the first row or token since the start, no ETA before a row finished in its window."""
        if not self._samples:
            return Rates()
        last = self._samples[-1]
        recent = self._first_since(last.seconds - self._rate_seconds)
        span = last.seconds - recent.seconds
        if span < MIN_SPAN_SECONDS:
            return Rates()
        oldest = self._samples[0]
        done = last.rows - oldest.rows
        return Rates(
            rows_per_second=max(0, last.rows - recent.rows) / span if self._rows_moved else None,
            tokens_per_second=max(0, last.tokens - recent.tokens) / span if self._tokens_moved else None,
            eta_seconds=rows_left * (last.seconds - oldest.seconds) / done if done > 0 else None,
        )

    def _first_since(self, seconds: float) -> _Sample:
        """The newest sample from before that time, or the oldest there is."""
        found = self._samples[0]
        for sample in self._samples:
            if sample.seconds > seconds:
                break
            found = sample
        return found


def format_duration(seconds: float | None) -> str:
    """1:02:03, 4:05 or "-" when not known."""
    if seconds is None:
        return "-"
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"
