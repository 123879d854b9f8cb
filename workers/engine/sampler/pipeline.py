"""The pipeline: edits, temperature, filters, noise, argmax. Used for the target's rows and for the draft's alike."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch

from workers.engine.api.request import TokenLogprob
from workers.engine.sampler.context import RowContext
from workers.engine.sampler.logprobs import logprobs_of
from workers.engine.sampler.parts import parts, readable


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token per row, or MASKED or INVALID (both negative) where none can be sampled.

    `logprobs` is empty when no row asks for any, else it has one entry per row.
    """

    tokens: list[int]
    logprobs: list[TokenLogprob | None] = field(default_factory=list)


def sample(logits: torch.Tensor, rows: Seq[RowContext]) -> Sampled:
    """Sample the next token of each row of `logits` [R, V]; a row's result depends on that row alone."""
    logits = readable(logits, rows)
    tokens = np.empty(len(rows), np.int64)
    for part in parts(logits, rows):
        cold, warm = part.split()
        if cold:
            tokens[part.index[cold]] = part.argmax(cold)
        if warm:
            tokens[part.index[warm]] = part.draw(warm, 1).tokens[:, 0]
    result: list[int] = tokens.tolist()
    return Sampled(result, logprobs_of(logits, rows, result))


def perturbed_top_k(logits: torch.Tensor, rows: Seq[RowContext], k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k best tokens of each row by log q + noise, best first: ids [R, k] int64 and scores [R, k] float32.

    The first one is what `sample` would return. At temperature 0 there is neither noise nor filter and the scores are
    log-probabilities. Where fewer than k tokens are allowed the rest is MASKED with score -inf; a row with a logit that
    is NaN or +inf is INVALID throughout.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    logits = readable(logits, rows)
    tokens, scores = np.empty((len(rows), k), np.int64), np.empty((len(rows), k), np.float32)
    for part in parts(logits, rows):
        drawn = part.draw(range(len(part.rows)), k, masses=True)
        tokens[part.index], scores[part.index] = drawn.tokens, drawn.scores - drawn.log_masses[:, None]
    return torch.from_numpy(tokens), torch.from_numpy(scores)
