"""Sequences whose drafts are accepted with a known probability."""

from __future__ import annotations

import random

from workers.engine import Request, SamplingParams
from workers.engine.state.sequence import Sequence
from workers.engine.verifier import Verdict

TOKENS = 128


def sequence(index: int, tokens: int = TOKENS, method: str | None = None) -> Sequence:
    request = Request(index, (1,), SamplingParams(max_tokens=tokens), method=method)
    return Sequence(request, index, frozenset(), 10**6)


def step(seq: Sequence, length: int, acceptance: float, rng: random.Random) -> Verdict:
    accepted = next((level for level in range(length) if rng.random() >= acceptance), length)
    seq.tokens.extend([1] * (accepted + 1))
    return Verdict(seq, accepted + 1, tuple(range(accepted)), min(accepted + 1, length))
