"""The steps of the pipeline that change single logits: bias, penalties, masks, in this order.

They touch few ids of a row, so they are done row by row on a copy, in place. Ids outside of the row are passed over: a
draft model's vocabulary may be smaller than the one that the parameters were checked against.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from workers.engine.sampler.context import RowContext

Row = npt.NDArray[np.floating[Any]]
Ids = npt.NDArray[np.int64]


def is_edited(context: RowContext) -> bool:
    """Whether `edit` would look at this row at all."""
    params = context.seq.params
    return bool(
        params.logit_bias
        or params.bad_words
        or (params.min_tokens and context.num_emitted < params.min_tokens)
        or params.needs_history
    )


def edit(logits: Row, context: RowContext) -> None:
    """Apply bias, penalties and masks to one row [V], in place."""
    params = context.params
    if params.logit_bias:
        _bias(logits, params.logit_bias)
    if params.needs_history:
        _penalise(logits, context)
    if context.num_emitted < params.min_tokens:
        _mask(logits, {*context.seq.eos_token_ids, *params.stop_token_ids})
    if params.bad_words:
        _mask(logits, [word[-1] for word in params.bad_words if context.ends_with(word[:-1])])


def _bias(logits: Row, biases: Mapping[int, float]) -> None:
    ids, amounts = _ids(biases), np.fromiter(biases.values(), logits.dtype, len(biases))
    known = ids < len(logits)
    logits[ids[known]] += amounts[known]


def _penalise(logits: Row, context: RowContext) -> None:
    params, counts = context.params, context.counts()
    emitted = _ids(counts)
    known = emitted < len(logits)
    emitted = emitted[known]
    if params.repetition_penalty != 1.0:
        prompt = _prompt_ids(context.seq.prompt_set)
        seen = np.concatenate([prompt[prompt < len(logits)], emitted])  # twice is as good as once: read, then written
        penalty = logits.dtype.type(params.repetition_penalty)
        values = logits[seen]
        logits[seen] = np.where(values > 0, values / penalty, values * penalty)
    if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
        times = np.fromiter(counts.values(), logits.dtype, len(counts))[known]
        logits[emitted] -= times * params.frequency_penalty + params.presence_penalty


def _mask(logits: Row, token_ids: Collection[int]) -> None:
    ids = _ids(token_ids)
    logits[ids[ids < len(logits)]] = -np.inf


def _ids(token_ids: Collection[int]) -> Ids:
    return np.fromiter(token_ids, np.int64, len(token_ids))


@lru_cache(maxsize=512)
def _prompt_ids(prompt_set: frozenset[int]) -> Ids:
    """Kept between steps: a prompt may be long and never changes."""
    return _ids(prompt_set)
