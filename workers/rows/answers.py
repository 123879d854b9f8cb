"""The answers of a job, each with the prompt that it answered, as token ids: what drafters learn from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from storage.records import Job, Result, RowStatus
from storage.store.store import Store
from workers.engine.api.tokenizer import TextTokenizer
from workers.rows.prepare import PreparedRow, Preparer
from workers.rows.read import read_chunk
from workers.rows.settings import engine_config


@dataclass(frozen=True, slots=True)
class Answer:
    """One result that can be learned from, or, with a `problem`, one that cannot."""

    prompt: Sequence[int] = ()
    tokens: Sequence[int] = ()
    """The end token included, where the target ended the answer."""
    carried: dict[str, Any] | None = None
    problem: str | None = None


def answers(store: Store, job: Job, tokenizer: TextTokenizer, max_model_len: int) -> Iterator[Answer]:
    """All recorded results of the job in row order; prompts are rendered and tokenised as the job did it.

    Raises `UnreadableInput` when the input is not there any more, or is another.
    """
    preparer = Preparer(job.spec, engine_config(job.spec), tokenizer, max_model_len)
    files = {file.index: file for file in store.jobs.files(job.id)}
    by_row = groupby(store.results.iterate(job.id), key=lambda result: result.row_index)
    index, results = next(by_row, (None, iter(())))
    for chunk in store.chunks.of_job(job.id):
        for rows in read_chunk(files[chunk.file_index], chunk, job.spec.input):
            for prepared in preparer.prepare(rows):
                if index != prepared.row.index:
                    continue
                prompt = prepared.token_ids if isinstance(prepared, PreparedRow) else None
                yield from (_answer(prompt, result) for result in results)
                index, results = next(by_row, (None, iter(())))


def _answer(prompt: Sequence[int] | None, result: Result) -> Answer:
    if result.status is not RowStatus.OK:
        return Answer(problem=f"errors ({result.error_code})")
    if result.output_token_ids is None:
        return Answer(problem="without token ids")
    if prompt is None or len(prompt) != result.num_prompt_tokens:
        return Answer(problem="whose prompt renders to other tokens now")
    return Answer(prompt, result.output_token_ids, result.carried)
