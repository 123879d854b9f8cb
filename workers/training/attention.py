"""Attention of a drafter while it is trained, as autograd knows it: several drafting steps over packed documents.

In the first step a row sees the rows of its document up to its own, as in the engine. In each further step it sees
those, and what it drafted itself: its own row in the steps before (EAGLE-3's training-time test, arXiv 2503.01840).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch


class PackedAttention:
    """`attend` for one pack, step after step. One layer."""

    def __init__(self, lengths: Seq[int]) -> None:
        self._lengths = list(lengths)
        self._first: tuple[torch.Tensor, torch.Tensor] | None = None
        """Keys and values of the first step, [H, T, D]."""
        self._drafted: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Of the further steps: [H, R, D] each, R rows that are the first ones of those in the step before."""
        self._rows: list[torch.Tensor] = []
        """Per document, places in it of the rows of the current step."""

    def step(self, rows: Seq[torch.Tensor]) -> None:
        """Begin a further step, of these rows of each document. They must be among the step's before."""
        if self._rows:
            kept = self._places(rows)
            self._drafted = [(k[:, kept], v[:, kept]) for k, v in self._drafted]
        self._rows = list(rows)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [T, H, D], k and v [T, Hk, D] of the current step's rows -> [T, H, D]."""
        assert layer == 0
        groups = q.shape[1] // k.shape[1]
        q = q.transpose(0, 1) * q.shape[-1] ** -0.5
        k, v = (x.repeat_interleave(groups, dim=1).transpose(0, 1) for x in (k, v))
        if self._first is None:
            self._first = k, v
            rows = [torch.arange(length) for length in self._lengths]
        else:
            self._drafted.append((k, v))
            rows = self._rows
        counts = [len(places) for places in rows]
        # Split, not sliced: the gradient of a slice is as large as what it was cut from.
        own = [(torch.split(x, counts, 1), torch.split(y, counts, 1)) for x, y in self._drafted]
        keys, values = (torch.split(x, self._lengths, 1) for x in self._first)
        parts = [
            _attend(part, places, keys[index], values[index], [(x[index], y[index]) for x, y in own])
            for index, (part, places) in enumerate(zip(torch.split(q, counts, 1), rows, strict=True))
        ]
        return torch.cat(parts, dim=1).transpose(0, 1)

    def _places(self, rows: Seq[torch.Tensor]) -> torch.Tensor:
        """Where these rows are among those of the current step."""
        found, offset = [], 0
        for new, old in zip(rows, self._rows, strict=True):
            found.append(torch.searchsorted(old, new) + offset)
            offset += len(old)
        return torch.cat(found)


def _attend(
    q: torch.Tensor,
    places: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    own: Seq[tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    """Of one document, [H, R, D]: its rows q at `places` over keys and values [H, T, D], and their `own` [H, R, D]."""
    behind = torch.arange(keys.shape[1]) > places[:, None]
    scores = (q @ keys.transpose(1, 2)).masked_fill(behind, -torch.inf)
    extra = [(q * k).sum(-1, keepdim=True) for k, _ in own]
    weights = torch.cat([scores, *extra], dim=-1).float().softmax(-1).to(q.dtype)
    shares = torch.split(weights, [keys.shape[1], *[1] * len(own)], dim=-1)
    attended: torch.Tensor = shares[0] @ values
    for share, (_, v) in zip(shares[1:], own, strict=True):
        attended = attended + share * v
    return attended
