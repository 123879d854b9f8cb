"""The prompts of a spec as workers would see them: read, rendered and tokenised by the same code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from runner.errors import UsageError
from runner.output.console import note
from scheduler.intake.dataset import Dataset, inspect
from scheduler.intake.planning import plan_chunks
from storage.spec import JobSpec
from workers.engine.api.config import EngineConfig
from workers.engine.api.sampling_params import SamplingParams
from workers.rows.prepare import PreparedRow, Preparer, RejectedRow
from workers.rows.read import read_chunk
from workers.rows.sampling import SamplingMerger
from workers.rows.settings import engine_config

if TYPE_CHECKING:
    from workers.engine.measure.preflight import Preview

FEW = 16
"""Prompts below which what is measured says more about them than about the data they stand for."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """Rows as the engine takes them, and how the job samples."""

    token_ids: list[Sequence[int]]
    params: SamplingParams
    """The job's, without those of single rows."""


def prepared_prompts(spec: JobSpec) -> Prompts:
    """The first `input.limit` rows, without those that would become errors; notes say how many, and when few are left.

    Loads no weights. Raises `UsageError` when no row is left, and what `inspect` and `preview` raise.
    """
    from workers.engine.measure.preflight import preview

    dataset = inspect(spec.input)
    # What is measured is one method, whichever the rows ask for.
    spec = replace(spec, input=replace(dataset.input, speculation_column=None))
    config = engine_config(spec)
    target = preview(config)
    prepared = list(_prepared(spec, dataset, config, target))
    rejected = [row for row in prepared if isinstance(row, RejectedRow)]
    prompts = [row.token_ids for row in prepared if isinstance(row, PreparedRow)]
    first = f"; the first: {rejected[0].code}, {rejected[0].message}" if rejected else ""
    if not prompts:
        raise UsageError(f"none of the {len(prepared)} rows read has a prompt that can run{first}")
    if rejected:
        note(f"{len(rejected)} of {len(prepared)} rows are left out, since they would become errors{first}")
    if len(prompts) < FEW:
        note(f"measured on {len(prompts)} prompts only: for a figure to go by, give at least {FEW} (rows, --limit)")
    params = SamplingMerger(spec, target.tokenizer).merge(None)
    return Prompts(prompts, replace(params, seed=spec.seed if params.seed is None else params.seed))


def _prepared(
    spec: JobSpec, dataset: Dataset, config: EngineConfig, target: Preview
) -> Iterator[PreparedRow | RejectedRow]:
    preparer = Preparer(spec, config, target.tokenizer, target.max_model_len)
    files = {file.index: file for file in dataset.files}
    for chunk in plan_chunks(dataset):
        for rows in read_chunk(files[chunk.file_index], chunk, spec.input):
            yield from preparer.prepare(rows)
