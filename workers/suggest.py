"""The nearest known name, for messages about names that are not known."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like this one, or None when none is near."""
    return next(iter(get_close_matches(name, list(known), n=1, cutoff=0.5)), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`"; did you mean 'top_p'?"`, or the empty string when nothing is near."""
    near = nearest(name, known)
    return f"; did you mean {near!r}?" if near else ""
