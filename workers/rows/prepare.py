"""From rows to requests: text to token ids, sampling parameters merged; a bad row becomes an error record."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from storage.spec import JobSpec
from storage.suggest import did_you_mean
from workers.engine.api.config import EngineConfig
from workers.engine.api.errors import EmptyPrompt, InvalidParams, PromptTooLong
from workers.engine.api.request import Request
from workers.engine.api.sampling_params import SamplingParams
from workers.engine.api.tokenizer import TextTokenizer
from workers.errors import BadRow
from workers.rows.prompt_length import LengthLimit, in_groups
from workers.rows.prompts import PromptRenderer
from workers.rows.read import Row
from workers.rows.sampling import SamplingMerger
from workers.rows.seeds import derive_seed

ELSEWHERE = "; add it with --row-method NAME, or set input.speculation_column if another column names the methods"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PreparedRow:
    """A row that can be generated: each of its samples is a request."""

    row: Row
    token_ids: Sequence[int]
    params: SamplingParams
    method: str | None = None
    """Speculation method of this row; None is the job's own."""

    def requests(self, key: tuple[int, ...], samples: Iterable[int], job_seed: int, job_id: str) -> list[Request]:
        """The requests of these samples; their ids are `(*key, row index, sample)`, their scope is the job."""
        return [
            Request(
                id=(*key, self.row.index, sample),
                prompt_token_ids=self.token_ids,
                params=self._seeded(derive_seed(job_seed, self.row.index, sample)),
                sample=sample,
                method=self.method,
                scope=job_id,
            )
            for sample in samples
        ]

    def _seeded(self, seed: int) -> SamplingParams:
        return replace(self.params, seed=seed) if self.params.seed is None else self.params


@dataclass(frozen=True, slots=True)
class RejectedRow:
    """A row that cannot be generated, with the code and message of its error record."""

    row: Row
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class _Draft:
    """A row that lacks its token ids only."""

    row: Row
    text: str
    params: SamplingParams
    method: str | None


class Preparer:
    """Prepares the rows of one chunk. Raises `InvalidSpec` when the job's own sampling parameters are wrong."""

    def __init__(self, spec: JobSpec, config: EngineConfig, tokenizer: TextTokenizer, max_model_len: int) -> None:
        self._length = LengthLimit(tokenizer, max_model_len)
        self._renderer = PromptRenderer(spec, tokenizer, self._length.check_messages)
        self._sampling = SamplingMerger(spec, tokenizer)
        self._methods = config.speculation.methods
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len

    def prepare(self, rows: Sequence[Row]) -> list[PreparedRow | RejectedRow]:
        """One entry for each row, in order. Nothing that a row holds can raise: it is that row's error."""
        drafts = [self._draft(row) for row in rows]
        token_ids = iter(self._tokenise([draft.text for draft in drafts if isinstance(draft, _Draft)]))
        return [self._checked(draft, next(token_ids)) if isinstance(draft, _Draft) else draft for draft in drafts]

    def _draft(self, row: Row) -> _Draft | RejectedRow:
        if row.problem is not None:
            return _rejected(row, row.problem)
        try:
            text = self._renderer.render(row.text)
            self._length.check(text)
            return _Draft(row, text, self._sampling.merge(row.sampling), self._method(row.speculation))
        except Exception as error:
            return _rejected(row, error)

    def _method(self, name: Any) -> str | None:
        """Raises `BadRow` (invalid_params) for a method that the job's engine does not have."""
        for method in (None, *self._methods):
            if name == method:
                return method
        known = ", ".join(self._methods)
        near = did_you_mean(name, self._methods) if isinstance(name, str) else ""
        message = f"speculation method {name!r} is not one of this job's: {known}{near}{ELSEWHERE}"
        raise BadRow(InvalidParams.code, message)

    def _tokenise(self, texts: Sequence[str]) -> Sequence[Sequence[int] | Exception]:
        """All texts in a few calls; one by one when that fails, so that only the text at fault is an error."""
        special_tokens = not self._renderer.uses_template
        encode = self._tokenizer.encode_batch
        try:
            return [ids for group in in_groups(texts) for ids in encode(group, special_tokens=special_tokens)]
        except Exception as error:
            if len(texts) == 1:
                return [error]
            return [ids for text in texts for ids in self._tokenise([text])]

    def _checked(self, draft: _Draft, token_ids: Sequence[int] | Exception) -> PreparedRow | RejectedRow:
        row = draft.row
        if isinstance(token_ids, Exception):
            return _rejected(row, token_ids)
        if not token_ids:
            return RejectedRow(row, EmptyPrompt.code, "the prompt has no tokens: there is nothing to answer to")
        if len(token_ids) >= self._max_model_len:
            length, limit = len(token_ids), self._max_model_len
            message = f"the prompt has {length} tokens; the context of {limit} has no room for an answer"
            return RejectedRow(row, PromptTooLong.code, message)
        return PreparedRow(row, token_ids, draft.params, draft.method)


def _rejected(row: Row, error: Exception) -> RejectedRow:
    if isinstance(error, BadRow):
        return RejectedRow(row, error.code, str(error))
    log.error("row %d could not be prepared", row.index, exc_info=error)
    return RejectedRow(row, "preparation_failed", f"{type(error).__name__}: {error}")
