"""The nearest known name, for messages about names that are not known."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

NEAR = 0.6
"""How alike two names must be, by difflib's ratio, for one to be suggested for the other."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like this one, or None when none is near."""
    return next(iter(get_close_matches(name, list(known), n=1, cutoff=NEAR)), None)


def did_you_mean(name: str, known: Iterable[str], *, most: int = 1) -> str:
    """`"; did you mean 'top_p'?"` with at most so many near names, or the empty string when nothing is near."""
    near = get_close_matches(name, list(known), n=most, cutoff=NEAR)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
