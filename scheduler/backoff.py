"""How long to wait before trying again."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Backoff:
    """Doubling waits, in seconds, from `first` up to `longest`."""

    first: float = 0.5
    longest: float = 15.0
    _next: float = field(default=0.0, init=False)

    def next(self) -> float:
        wait = self._next or self.first
        self._next = min(2 * wait, self.longest)
        return wait
