"""Paired measurements: ratios with their spread, never a bare time."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median


def spread(values: Sequence[float], digits: int = 2) -> str:
    """median (min to max) of the values."""
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def paired(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """ours / theirs, run by run."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]
