"""Counts that have to reconcile."""

from __future__ import annotations

from workers.engine import Completion


def reconcile(completion: Completion) -> None:
    stats = completion.stats
    assert stats.steps + stats.accepted == len(completion.token_ids)
    assert stats.accepted + stats.trimmed <= stats.drafted
    assert sum(stats.histogram) == stats.steps
    assert sum(k * count for k, count in enumerate(stats.histogram)) == stats.accepted
    assert sum(stats.accepted_per_depth) == stats.accepted
    assert all(a <= r for a, r in zip(stats.accepted_per_depth, stats.reached_per_depth, strict=False))
