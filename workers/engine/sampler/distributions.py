"""The distribution that a row is sampled from, for verification rules that need more than one draw of it."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch

from workers.engine.kernels.sampling import INVALID, MASKED
from workers.engine.sampler.checks import SamplingFailed
from workers.engine.sampler.context import RowContext
from workers.engine.sampler.parts import parts, readable


def distributions(logits: torch.Tensor, rows: Seq[RowContext], *, allow_masked: bool = False) -> torch.Tensor:
    """[R, V] on the CPU, in float64 where the logits are, else float32: what `sample` draws each row's token from.

    At temperature 0 all of it lies on one token. Raises SamplingFailed, which names the rows, where a logit is NaN or
    +inf, and where every token is masked; with `allow_masked` such a row is 0 everywhere.
    """
    logits = readable(logits, rows)
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    result = torch.zeros(logits.shape, dtype=dtype)
    states = np.zeros(len(rows), np.int64)
    for part in parts(logits, rows):
        cold = [i for i, row in enumerate(part.rows) if row.params.temperature == 0.0]
        warm = [i for i, row in enumerate(part.rows) if row.params.temperature != 0.0]
        if cold:
            tokens = part.argmax(cold)
            states[part.index[cold]] = tokens
            found = tokens >= 0
            result[part.index[cold][found], tokens[found]] = 1.0
        if warm:
            weights, masses = part.weigh(warm)
            states[part.index[warm]] = np.minimum(masses, 0)
            weights = weights.to(dtype).div_(torch.from_numpy(np.where(masses > 0, masses, 1.0)).to(dtype)[:, None])
            if len(warm) == len(rows):
                result = weights
            else:
                result[part.index[warm]] = weights
    masked, invalid = np.flatnonzero(states == MASKED).tolist(), np.flatnonzero(states == INVALID).tolist()
    if invalid or (masked and not allow_masked):
        raise SamplingFailed(masked, invalid)
    return result
