"""The sampler: a pure function of (logits row, sampling parameters, tokens so far, key, position)."""

from workers.engine.sampler.checks import validate_params
from workers.engine.sampler.context import RowContext, split
from workers.engine.sampler.distributions import distributions
from workers.engine.sampler.logprobs import logprobs_of
from workers.engine.sampler.pipeline import Sampled, perturbed_top_k, sample

__all__ = [
    "RowContext",
    "Sampled",
    "distributions",
    "logprobs_of",
    "perturbed_top_k",
    "sample",
    "split",
    "validate_params",
]
