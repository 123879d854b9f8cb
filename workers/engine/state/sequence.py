"""The live state of one request inside the engine."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from workers.engine.api.errors import EngineError
from workers.engine.api.request import FinishReason, Request, TokenLogprob
from workers.engine.api.sampling_params import SamplingParams
from workers.engine.api.stats import AcceptanceStats
from workers.engine.text.detokenizer import StopScanner

_MASK = 2**64 - 1


def request_key(seed: int, sample: int) -> int:
    """64-bit noise key of one sample of a request: splitmix64 of the seed, advanced by the sample index."""
    return _splitmix64((seed + sample * 0x9E3779B97F4A7C15) & _MASK)


def _splitmix64(value: int) -> int:
    """Finaliser of Steele, Lea and Flood (OOPSLA 2014): a bijection, so different seeds never share a key."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@dataclass(slots=True, eq=False)
class Sequence:
    """One request while it runs. `tokens` holds prompt and emitted tokens, and nothing that is not verified."""

    request: Request
    index: int
    """Order of submission; unique in an engine's life."""
    eos_token_ids: frozenset[int]
    max_len: int
    """Context end: no more than this many tokens, prompt included."""
    tokens: list[int] = field(init=False)
    num_prompt: int = field(init=False)
    key: int = field(init=False)
    counts: dict[int, int] = field(default_factory=dict)
    """How often each token was emitted; kept only when penalties need it."""
    prompt_set: frozenset[int] = frozenset()
    stats: AcceptanceStats = field(default_factory=AcceptanceStats)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop id or stop string that ended it."""
    scanner: StopScanner | None = None
    """Watches for stop strings; None when the request has none."""
    stopped_text: str | None = None
    """The output text up to the stop string that ended it."""
    error: EngineError | None = None
    num_preemptions: int = 0
    num_overtaken: int = 0
    """How many sequences behind it in line were admitted before it."""
    submitted: float = field(default_factory=time.monotonic)
    admitted: float | None = None
    first_token: float | None = None
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_token_ids)
        self.num_prompt = len(self.tokens)
        self.key = request_key(self.params.seed or 0, self.request.sample)
        if self.params.needs_history:
            self.prompt_set = frozenset(self.tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def num_emitted(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def num_remaining(self) -> int:
        """How many tokens it may still emit."""
        return min(self.params.max_tokens - self.num_emitted, self.max_len - len(self.tokens))

    def emit(self, token: int) -> None:
        """Append one verified token, and finish when it ends the sequence."""
        self.tokens.append(token)
        if self.params.needs_history:
            self.counts[token] = self.counts.get(token, 0) + 1
        self.finish_reason = self._why_finished(token)

    def fail(self, error: EngineError) -> None:
        """End in an error instead of an answer."""
        self.error = error
        self.finish_reason = FinishReason.ERROR

    def ends_with(self, token: int) -> bool:
        """Whether emitting `token` would end the sequence by its id alone; such a token is not worth drafting."""
        return (token in self.eos_token_ids and not self.params.ignore_eos) or token in self.params.stop_token_ids

    def _why_finished(self, token: int) -> FinishReason | None:
        params = self.params
        if token in self.eos_token_ids and not params.ignore_eos:
            return FinishReason.EOS
        if token in params.stop_token_ids:
            self.stop_reason = token
            return FinishReason.STOP
        if self.scanner and self._meets_stop_string(self.scanner, token):
            return FinishReason.STOP
        if self.num_remaining <= 0:
            return FinishReason.LENGTH
        return None

    def _meets_stop_string(self, scanner: StopScanner, token: int) -> bool:
        match = scanner.push(token)
        if match is None or self.num_emitted < self.params.min_tokens:
            return False
        self.stop_reason = match.stop
        self.stopped_text = scanner.text[: match.start]
        return True
