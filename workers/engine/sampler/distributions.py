"""The distribution that a row is sampled from, for verification rules that need more than one draw of it."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch

from workers.engine.sampler.context import RowContext
from workers.engine.sampler.parts import parts, readable


def distributions(logits: torch.Tensor, rows: Seq[RowContext]) -> torch.Tensor:
    """[R, V] on the CPU, in float64 where the logits are, else float32: what `sample` draws each row's token from.

    At temperature 0 all of it lies on one token. A row that nothing can be sampled from is 0 everywhere.
    """
    logits = readable(logits, rows)
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    result = torch.zeros(logits.shape, dtype=dtype)
    for part in parts(logits, rows):
        cold, warm = part.split()
        if cold:
            tokens = part.argmax(cold)
            found = tokens >= 0
            result[part.index[cold][found], tokens[found]] = 1.0
        if warm:
            weights, masses = part.weigh(warm)
            weights = weights.to(dtype).div_(torch.from_numpy(np.where(masses > 0, masses, 1.0)).to(dtype)[:, None])
            weights[masses <= 0] = 0.0
            if len(warm) == len(rows):
                result = weights
            else:
                result[part.index[warm]] = weights
    return result
