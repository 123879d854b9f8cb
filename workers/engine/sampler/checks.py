"""What can be wrong with a row, or with parameters once the vocabulary is known."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from workers.engine.api.errors import InvalidParams
from workers.engine.api.sampling_params import SamplingParams

_LARGEST_BIAS = float(np.finfo(np.float32).max)


def validate_params(params: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidParams for token ids outside the vocabulary and biases that float32 cannot hold."""
    _in_vocabulary("logit_bias", params.logit_bias, vocab_size)
    _in_vocabulary("stop_token_ids", params.stop_token_ids, vocab_size)
    for word in params.bad_words:
        _in_vocabulary("bad_words", word, vocab_size)
    for token, bias in params.logit_bias.items():
        if bias > _LARGEST_BIAS:
            raise InvalidParams(f"logit_bias has {token}: {bias}; 100 already forces a token, and -inf masks one")


def _in_vocabulary(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token in token_ids:
        if not 0 <= token < vocab_size:
            raise InvalidParams(f"{name} has token id {token}; the model's vocabulary is 0..{vocab_size - 1}")
