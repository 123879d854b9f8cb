"""Sampling parameters of one request, checked when they are made."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from workers.engine.errors import InvalidParams

MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a request is sampled. Every field takes part in exactness: the same values give the same tokens.

    Names and meanings follow the OpenAI and vLLM APIs. `seed=None` lets the caller derive one; the engine itself
    never draws a seed. Raises `InvalidParams`, naming the field, for a value out of range.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Multiplicative, over prompt and output (CTRL, arXiv 1909.05858)."""
    presence_penalty: float = 0.0
    """Subtracted once from tokens that were emitted."""
    frequency_penalty: float = 0.0
    """Subtracted per emission."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not be completed."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    """None: no log-probabilities; 0: those of the emitted tokens; k: the k best besides."""

    def __post_init__(self) -> None:
        _normalise(self)
        _in_range(self, "max_tokens", low=1)
        _in_range(self, "min_tokens", low=0, high=self.max_tokens)
        _in_range(self, "temperature", low=0.0, high=100.0)
        _in_range(self, "top_p", low=0.0, high=1.0, open_low=True)
        _in_range(self, "top_k", low=0)
        _in_range(self, "min_p", low=0.0, high=1.0)
        _in_range(self, "repetition_penalty", low=0.0, open_low=True)
        _in_range(self, "presence_penalty", low=-2.0, high=2.0)
        _in_range(self, "frequency_penalty", low=-2.0, high=2.0)
        _in_range(self, "n", low=1, high=128)
        if self.logprobs is not None:
            _in_range(self, "logprobs", low=0, high=MAX_LOGPROBS)
        if self.seed is not None:
            _in_range(self, "seed", low=-(2**63), high=2**64 - 1)
        if any(not word for word in self.bad_words):
            raise InvalidParams("bad_words holds an empty sequence; remove it")
        if any(not text for text in self.stop):
            raise InvalidParams("stop holds an empty string, which would stop at once; remove it")
        for token, bias in self.logit_bias.items():
            if token < 0 or math.isnan(bias):
                raise InvalidParams(f"logit_bias has {token}: {bias}; ids are >= 0 and biases are numbers")

    @property
    def needs_history(self) -> bool:
        """Whether logits depend on which tokens came before (penalties)."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


FIELD_NAMES = tuple(f.name for f in fields(SamplingParams))
_INTEGERS = {"max_tokens", "min_tokens", "top_k", "n", "logprobs", "seed"}
_NUMBERS = {
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
}  # fmt: skip


def _normalise(params: SamplingParams) -> None:
    """Give every field its declared type, so that values from YAML, JSON and Parquet compare equal."""
    for name in _INTEGERS:
        value = getattr(params, name)
        if value is None and name in ("logprobs", "seed"):
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            if not (isinstance(value, float) and value.is_integer()):
                raise InvalidParams(f"{name} must be an integer, got {value!r}")
            object.__setattr__(params, name, int(value))
    for name in _NUMBERS:
        value = getattr(params, name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InvalidParams(f"{name} must be a number, got {value!r}")
        object.__setattr__(params, name, float(value))
    if not isinstance(params.ignore_eos, bool):
        raise InvalidParams(f"ignore_eos must be true or false, got {params.ignore_eos!r}")
    stop: Any = params.stop
    _convert(params, "stop", "a string or a list of strings", lambda: (stop,) if isinstance(stop, str) else tuple(stop))
    _convert(
        params, "stop_token_ids", "a list of token ids", lambda: tuple(operator.index(t) for t in params.stop_token_ids)
    )
    _convert(
        params,
        "bad_words",
        "a list of token sequences",
        lambda: tuple(tuple(operator.index(t) for t in word) for word in params.bad_words),
    )
    _convert(
        params,
        "logit_bias",
        "a mapping from token id to number",
        lambda: {int(t): float(b) for t, b in dict(params.logit_bias).items()},
    )
    if not all(isinstance(text, str) for text in params.stop):
        raise InvalidParams(f"stop must be strings, got {params.stop!r}")


def _convert(params: SamplingParams, name: str, expected: str, convert: Callable[[], Any]) -> None:
    try:
        object.__setattr__(params, name, convert())
    except (TypeError, ValueError) as error:
        raise InvalidParams(f"{name} must be {expected}, got {getattr(params, name)!r}") from error


def _in_range(params: SamplingParams, name: str, low: float, high: float = math.inf, *, open_low: bool = False) -> None:
    value = getattr(params, name)
    if (low < value if open_low else low <= value) and value <= high and value != math.inf:
        return
    bounds = f"{'>' if open_low else '>='} {low:g}" + (f" and <= {high:g}" if high != math.inf else "")
    raise InvalidParams(f"{name} must be {bounds}, got {value!r}")
