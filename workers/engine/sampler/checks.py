"""What can be wrong with a row, or with parameters once the vocabulary is known."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from workers.engine.errors import EngineError, InvalidParams
from workers.engine.sampling_params import SamplingParams

_LARGEST_BIAS = float(np.finfo(np.float32).max)


class SamplingFailed(EngineError):
    """Rows that no token can be sampled from. The other rows of the call may be sampled again without them."""

    code = "sampling_failed"

    def __init__(self, masked: Sequence[int], invalid: Sequence[int]) -> None:
        reasons = []
        if masked:
            what_to_do = "loosen logit_bias, bad_words, stop_token_ids or min_tokens"
            reasons.append(f"every token is masked in rows {list(masked)}; {what_to_do}")
        if invalid:
            reasons.append(f"logits are NaN or infinite in rows {list(invalid)}; check the model's weights and dtype")
        super().__init__("cannot sample: " + ", and ".join(reasons))
        self.rows = tuple(sorted({*masked, *invalid}))
        """Indices in the call."""


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
