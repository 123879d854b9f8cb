"""Log-probabilities as the OpenAI and vLLM APIs report them: the model's own, before any sampling parameter."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
import torch

from workers.engine.api.request import TokenLogprob
from workers.engine.sampler.context import RowContext
from workers.engine.sampler.interface import PLAIN, Ids, sampler_on
from workers.engine.state.drawn import MASKED


def logprobs_of(logits: torch.Tensor, rows: Seq[RowContext], tokens: Seq[int]) -> list[TokenLogprob | None]:
    """Those of one token per row of `logits` [R, V], for the rows that ask and have a token; empty when none does."""
    asking = {i: row.params.logprobs for i, row in enumerate(rows) if row.params.logprobs is not None}
    wanted = {i: count for i, count in asking.items() if tokens[i] >= 0}
    if not wanted:
        return []
    at, settings = np.array(list(wanted)), [PLAIN] * len(wanted)
    drawn = sampler_on(logits.device).draw(logits, at, settings, max(1, *wanted.values()), masses=True)
    sampled = np.array([tokens[i] for i in wanted])
    own = _below_maximum(logits[at], sampled, drawn.tokens[:, 0]) - drawn.log_masses
    best = drawn.scores - drawn.log_masses[:, None]
    result: list[TokenLogprob | None] = [None] * len(rows)
    for n, (i, count) in enumerate(wanted.items()):
        pairs = zip(drawn.tokens[n, :count].tolist(), best[n, :count].tolist(), strict=True)
        result[i] = TokenLogprob(tokens[i], float(own[n]), tuple(pair for pair in pairs if pair[0] != MASKED))
    return result


def _below_maximum(logits: torch.Tensor, tokens: Ids, best: Ids) -> np.typing.NDArray[np.float32]:
    """Logit of `tokens` [R] minus that of `best` [R], rounded as backends do."""
    pairs = logits.gather(1, torch.from_numpy(np.stack([tokens, best], axis=1)).to(logits.device)).cpu()
    if pairs.dtype == torch.bfloat16:
        pairs = pairs.float()
    return (pairs[:, 0] - pairs[:, 1]).float().numpy()
