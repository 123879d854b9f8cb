"""From completions and rejected rows to the records of the store, written in batches while the chunk runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict

from storage.records import Acceptance, Lease, Result, RowStatus, TokenCounts
from storage.retry import patiently
from storage.store.store import Store
from workers.engine.api.request import Completion, FinishReason
from workers.engine.api.sampling_params import SamplingParams
from workers.engine.api.stats import AcceptanceStats, EngineSnapshot
from workers.rows.prepare import RejectedRow
from workers.rows.read import Row

WRITE_ROWS = 200
WRITE_SECONDS = 1.0
"""A crash loses at most what finished since the last write: this long, or this many results."""
MAX_MESSAGE = 2000
"""Characters of an error's message: some quote what a row holds."""


def result_of(completion: Completion, row: Row, params: SamplingParams, *, keep_token_ids: bool) -> Result:
    """The record of an answer, or of a request that the engine refused."""
    if completion.finish_reason is FinishReason.ERROR:
        return error_of(
            row, completion.sample, completion.error_code or "engine_error", completion.error_message or "no message"
        )
    timings = completion.timings
    return Result(
        row_index=row.index,
        sample=completion.sample,
        status=RowStatus.OK,
        output_text=completion.text,
        output_token_ids=completion.token_ids if keep_token_ids else None,
        finish_reason=completion.finish_reason.value,
        stop_reason=None if completion.stop_reason is None else str(completion.stop_reason),
        row_id=row.row_id,
        carried=row.carried,
        num_prompt_tokens=completion.num_prompt_tokens,
        num_output_tokens=len(completion.token_ids),
        method=completion.method,
        temperature=params.temperature,
        seed=params.seed,
        logprobs=_logprobs(completion),
        queue_seconds=timings.queue,
        first_token_seconds=timings.first_token,
        total_seconds=timings.total,
        draft_seconds=timings.draft,
        verify_seconds=timings.verify,
        num_preemptions=completion.num_preemptions,
        acceptance=_acceptance(completion.stats),
    )


def tokens_of(counted: AcceptanceStats | EngineSnapshot) -> TokenCounts:
    """What an engine has counted, under the names that the store has for it."""
    return TokenCounts(
        num_output_tokens=counted.emitted,
        num_spec_steps=counted.steps,
        num_draft_tokens=counted.drafted,
        num_accepted_draft_tokens=counted.accepted,
    )


def _acceptance(stats: AcceptanceStats) -> Acceptance:
    """The same of one answer, with its arrays; a depth in a draft is called a position in SQL, and counts from 0."""
    return Acceptance(
        **asdict(tokens_of(stats)),
        num_trimmed_draft_tokens=stats.trimmed,
        acceptance_histogram=tuple(stats.histogram),
        reached_per_position=tuple(stats.reached_per_depth),
        accepted_per_position=tuple(stats.accepted_per_depth),
    )


def results_of_rejected(rejected: RejectedRow, samples: Iterable[int]) -> list[Result]:
    """A bad row is an error in each of its samples."""
    return [error_of(rejected.row, sample, rejected.code, rejected.message) for sample in samples]


def error_of(row: Row, sample: int, code: str, message: str) -> Result:
    """The record of a (row, sample) that has no answer."""
    return Result(
        row_index=row.index,
        sample=sample,
        status=RowStatus.ERROR,
        error_code=code,
        error_message=message if len(message) <= MAX_MESSAGE else message[:MAX_MESSAGE] + "…",
        row_id=row.row_id,
        carried=row.carried,
    )


def _logprobs(completion: Completion) -> list[dict[str, object]] | None:
    if completion.logprobs is None:
        return None
    return [
        {"token_id": token.token_id, "logprob": token.logprob, "top": [list(pair) for pair in token.top]}
        for token in completion.logprobs
    ]


class ResultWriter:
    """Collects the results of one chunk and writes them under its lease."""

    def __init__(self, store: Store, lease: Lease, give_up: Callable[[], bool]) -> None:
        self.num_ok = 0
        self.num_errors = 0
        """Results handed in so far, recorded or about to be."""
        self._store = store
        self._lease = lease
        self._give_up = give_up
        self._pending: list[Result] = []
        self._oldest = 0.0

    def add(self, result: Result) -> None:
        if not self._pending:
            self._oldest = time.monotonic()
        self._pending.append(result)
        if result.status is RowStatus.OK:
            self.num_ok += 1
        else:
            self.num_errors += 1

    def flush_if_due(self) -> None:
        """Write when `WRITE_ROWS` results wait, or one has waited for `WRITE_SECONDS`."""
        if len(self._pending) >= WRITE_ROWS or (self._pending and time.monotonic() - self._oldest >= WRITE_SECONDS):
            self.flush()

    def flush(self) -> None:
        """Write what waits. Raises `LeaseLost`. A store out of reach is tried again until it is given up."""
        if not self._pending:
            return
        patiently(lambda: self._store.results.write(self._lease, self._pending), self._give_up)
        self._pending = []
