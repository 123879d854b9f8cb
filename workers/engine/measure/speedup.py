"""What speculation should gain, from how often drafts are right and what they cost."""

from __future__ import annotations

from collections.abc import Sequence as Seq


def expected_tokens(conditional: Seq[float]) -> float:
    """Tokens per step when the i-th drafted token is accepted with probability conditional[i], the ones before it
    being accepted: 1 + sum over depths of the running product."""
    total, survival = 1.0, 1.0
    for probability in conditional:
        survival *= probability
        total += survival
    return total


def best_length(acceptance: float, cost: float, verify: Seq[float]) -> tuple[int, float]:
    """The draft length with the largest speedup, and that: E(g) / (g * cost + verify[g]).

    `cost` is the time of a draft pass and verify[g] that of a pass which checks g drafted tokens, both by the time of a
    plain step; verify has one entry more than the longest draft, which is at least 1.
    """
    speedups = [
        expected_tokens([acceptance] * length) / (length * cost + verify[length]) for length in range(1, len(verify))
    ]
    best = max(range(len(speedups)), key=lambda index: (speedups[index], -index))
    return best + 1, speedups[best]
