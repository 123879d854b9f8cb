"""The pipeline: edits, temperature, filters, noise, argmax. Used for the target's rows and for the draft's alike.

Rows of a call are sorted into those read where they lie and those edited in a copy, and each of these into argmax
(temperature 0) and draw; none of this shows in a row's result.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from workers.engine.kernels.sampling import INVALID, MASKED, ROW, argmax, draw
from workers.engine.request import TokenLogprob
from workers.engine.sampler.checks import SamplingFailed
from workers.engine.sampler.context import RowContext
from workers.engine.sampler.edits import edit, is_edited

Ids = npt.NDArray[np.int64]

_COLDEST = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token per row. `logprobs` is empty when no row asks for any, else has one entry per row."""

    tokens: list[int]
    logprobs: list[TokenLogprob | None] = field(default_factory=list)


def sample(logits: torch.Tensor, rows: Seq[RowContext]) -> Sampled:
    """Sample the next token of each row of `logits` [R, V].

    A row's result depends on that row alone. Raises SamplingFailed, with the rows, where no token is left or a logit is
    NaN or +inf.
    """
    _check_shape(logits, rows)
    tokens = np.empty(len(rows), np.int64)
    for part in _parts(logits, rows):
        for chosen in _by_temperature(part):
            tokens[chosen.origin] = chosen.greedy() if chosen.is_greedy else chosen.draw(1)[0][:, 0]
    _raise_failures(tokens)
    result = tokens.tolist()
    return Sampled(result, _logprobs(logits, rows, result))


def perturbed_top_k(logits: torch.Tensor, rows: Seq[RowContext], k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k best tokens of each row by log q + noise, best first: token ids [R, k] int64 and scores [R, k] float32.

    The first one is what `sample` would return. At temperature 0 there is neither noise nor filter, and the scores are
    log-probabilities. Where fewer than k tokens are left, the rest is -1 with score -inf. Raises like `sample`.
    """
    _check_shape(logits, rows)
    tokens, scores = np.empty((len(rows), k), np.int64), np.empty((len(rows), k), np.float32)
    for part in _parts(logits, rows):
        tokens[part.origin], scores[part.origin] = part.draw(k)
    _raise_failures(tokens[:, 0])
    return torch.from_numpy(tokens), torch.from_numpy(scores)


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows `source` of a CPU tensor; `origin` says which rows of the call they are."""

    logits: torch.Tensor  # [?, V], each row contiguous
    source: Ids
    origin: Ids
    rows: Seq[RowContext]

    @property
    def is_greedy(self) -> bool:
        return self.rows[0].params.temperature == 0.0
