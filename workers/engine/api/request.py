"""What goes into the engine and what comes out."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from workers.engine.api.errors import InvalidParams
from workers.engine.api.sampling_params import SamplingParams
from workers.engine.api.stats import AcceptanceStats


class FinishReason(StrEnum):
    EOS = "eos"
    STOP = "stop"
    """A stop id or a stop string."""
    LENGTH = "length"
    """max_tokens, or the end of the context."""
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Request:
    """One (row, sample): token ids in, at most `params.max_tokens` token ids out.

    `id` is the caller's and must be unique among the requests in flight. `sample` is mixed into the seed, so the n
    samples of one prompt differ.
    """

    id: Hashable
    """Raises `InvalidParams` when it is not hashable; whatever the other fields hold is answered with an error."""
    prompt_token_ids: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    sample: int = 0
    method: str | None = None
    """Speculator for this request, one of the engine's `SpeculationConfig.methods`; None takes the first."""
    scope: Hashable = None
    """Requests of one scope (a job) may learn drafts from each other's finished outputs; others never."""

    def __post_init__(self) -> None:
        try:
            hash(self.id)
        except TypeError as error:
            raise InvalidParams(f"the id of a request must be hashable, got {self.id!r}") from error


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities of one emitted token and of the best ones (`top`, best first, perhaps with it among them).

    They are the model's own: a log-softmax of its logits before bias, penalties, masks, temperature and filters.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds. Queue: submitted to admitted; first token and total count from submission."""

    queue: float = 0.0
    first_token: float = 0.0
    total: float = 0.0
    draft: float = 0.0
    """This request's share of the time spent drafting."""
    verify: float = 0.0
    """Its share of the rest of the steps: target passes, sampling, what goes around them."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The one answer to a request. `error` is set, and the tokens are empty, when finish_reason is ERROR."""

    request_id: Hashable
    sample: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    num_prompt_tokens: int
    stats: AcceptanceStats
    timings: Timings
    method: str
    """Speculator and verification rule that ran, for example "ngram" or "draft_model"."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    num_preemptions: int = 0
    stop_reason: int | str | None = None
    """With finish_reason STOP: the stop id, or the stop string, which `text` ends before."""
    error_code: str | None = None
    error_message: str | None = None


class Tokenizer(Protocol):
    """The part of a tokenizer that the engine itself needs."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_token_ids(self) -> frozenset[int]: ...
    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids, special tokens left out; an unfinished multi-byte character shows as U+FFFD."""
        ...
