"""Sampling parameters of one request, checked when they are made."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from workers.engine.api.errors import InvalidParams
from workers.engine.api.options import Problem, Range, is_integer, is_number, out_of_range

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
        wrong = dict(_normalise(self))
        wrong |= dict(out_of_range(self, _RANGES, wrong))
        problems = [*wrong.values(), *_unusable(self, wrong)]
        if wrong.keys().isdisjoint(("min_tokens", "max_tokens")) and self.min_tokens > self.max_tokens:
            problems.append(f"min_tokens must be 0 to max_tokens, got {self.min_tokens} and {self.max_tokens}")
        if problems:
            raise InvalidParams(*problems)

    @property
    def needs_history(self) -> bool:
        """Whether logits depend on which tokens came before (penalties)."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


FIELD_NAMES = tuple(f.name for f in fields(SamplingParams))
_INTEGERS = ("max_tokens", "min_tokens", "top_k", "n", "logprobs", "seed")
_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_OPTIONAL = ("logprobs", "seed")
_RANGES = {
    "max_tokens": Range(1),
    "min_tokens": Range(0),
    "temperature": Range(0, 100),
    "top_p": Range(0, 1, above=True),
    "top_k": Range(0),
    "min_p": Range(0, 1),
    "repetition_penalty": Range(0, above=True),
    "presence_penalty": Range(-2, 2),
    "frequency_penalty": Range(-2, 2),
    "n": Range(1, 128),
    "logprobs": Range(0, MAX_LOGPROBS),
    "seed": Range(-(2**63), 2**64 - 1),
}


def _normalise(params: SamplingParams) -> Iterator[Problem]:
    """Give every field its declared type, so that values from YAML, JSON and Parquet compare equal."""
    for name in _INTEGERS:
        value = getattr(params, name)
        if isinstance(value, float) and value.is_integer():
            object.__setattr__(params, name, int(value))
        elif not (is_integer(value) or (value is None and name in _OPTIONAL)):
            yield name, f"{name} must be an integer, got {value!r}"
    for name in _NUMBERS:
        value = getattr(params, name)
        if is_number(value):
            object.__setattr__(params, name, float(value))
        else:
            yield name, f"{name} must be a number, got {value!r}"
    ignore_eos: Any = params.ignore_eos
    if not isinstance(ignore_eos, bool):
        yield "ignore_eos", f"ignore_eos must be true or false, got {ignore_eos!r}"
    for name, (words, convert) in _CONVERSIONS.items():
        value = getattr(params, name)
        try:
            object.__setattr__(params, name, convert(value))
        except (TypeError, ValueError, OverflowError):
            yield name, f"{name} must be {words}, got {value!r}"


def _texts(value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else tuple(value)
    if not all(isinstance(text, str) for text in texts):
        raise TypeError
    return texts


def _token_id(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def _token_ids(value: Any) -> tuple[int, ...]:
    return tuple(map(_token_id, value))


def _key(value: Any) -> int:
    """A token id; JSON has texts for keys."""
    return int(value) if isinstance(value, str) else _token_id(value)


_CONVERSIONS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "stop": ("a string or a list of strings", _texts),
    "stop_token_ids": ("a list of token ids", _token_ids),
    "bad_words": ("a list of token sequences", lambda value: tuple(_token_ids(word) for word in value)),
    "logit_bias": (
        "a mapping from token id to number",
        lambda value: {_key(token): float(bias) for token, bias in dict(value).items()},
    ),
}


def _unusable(params: SamplingParams, wrong: Mapping[str, str]) -> Iterator[str]:
    """Values that no sampler can take, among those of the right type."""
    if "bad_words" not in wrong and not all(params.bad_words):
        yield "bad_words holds an empty sequence; remove it"
    if "stop" not in wrong and not all(params.stop):
        yield "stop holds an empty string, which would stop at once; remove it"
    for token, bias in () if "logit_bias" in wrong else params.logit_bias.items():
        if token < 0 or math.isnan(bias):
            yield f"logit_bias has {token}: {bias}; ids are >= 0 and biases are numbers"
