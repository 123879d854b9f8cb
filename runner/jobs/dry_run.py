"""`run --dry-run`: what would be asked, how long prompts are, how the work would be cut. Loads no weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from runner.errors import ExitCode
from runner.jobs.row_methods import with_row_methods
from runner.output.output import Fields, Output, Passage, Table
from scheduler.intake.dataset import Dataset, inspect
from scheduler.intake.planning import default_chunk_rows, plan_chunks
from storage.spec import JobSpec
from workers.engine.api.config import OPTIONS_OF_CHOICES, OPTIONS_OF_METHODS, EngineConfig, SpeculationConfig
from workers.engine.api.errors import EngineError
from workers.rows.prepare import PreparedRow, Preparer, RejectedRow
from workers.rows.prompts import PromptRenderer
from workers.rows.read import Row, read_chunk
from workers.rows.settings import engine_config, sampling_params

if TYPE_CHECKING:
    from workers.engine.measure.preflight import Preflight

SHOWN_PROMPTS = 3
SAMPLED_ROWS = 2000
SAMPLED_PLACES = 20
"""The sampled rows come from this many places, spread evenly over the dataset."""
BAR_WIDTH = 40


@dataclass(frozen=True, slots=True)
class DryRun:
    plan: dict[str, Any]
    prompts: list[dict[str, Any]]
    """Rendered prompts of the first rows that have one."""
    num_sampled: int
    histogram: dict[int, int]
    """Upper bound of a bucket (a power of two) -> sampled prompts with at most that many tokens."""
    rejected: list[dict[str, Any]]
    """Sampled rows that would become errors."""


def show_dry_run(spec: JobSpec, output: Output) -> ExitCode:
    """Inspect, sample and show. Raises what `inspect`, `Preflight` and `Preparer` raise: what would keep the job from
    running. Returns the exit code: `FAILED_ROWS` when not one of the sampled rows could be answered."""
    from workers.engine.measure.preflight import Preflight

    spec, dataset = with_row_methods(spec, inspect(spec.input))
    result = dry_run(spec, dataset, Preflight(engine_config(spec)))
    output.show(asdict(result), *_parts(result))
    return ExitCode.FAILED_ROWS if result.rejected and not result.histogram else ExitCode.OK


def dry_run(spec: JobSpec, dataset: Dataset, engine: Preflight) -> DryRun:
    """Prepare a sample of the dataset exactly as a worker would, and refuse what its engine would refuse."""
    preparer = Preparer(spec, engine.config, engine.tokenizer, engine.max_model_len)
    renderer = PromptRenderer(spec, engine.tokenizer)
    prompts: list[dict[str, Any]] = []
    rejected: list[dict[str, Any]] = []
    histogram: Counter[int] = Counter()
    sampled = 0
    for rows in _sampled_rows(dataset):
        sampled += len(rows)
        for prepared in (_admitted(row, engine, spec.seed) for row in preparer.prepare(rows)):
            row = prepared.row
            if isinstance(prepared, RejectedRow):
                rejected.append(
                    {"row_index": row.index, "error_code": prepared.code, "error_message": prepared.message}
                )
                continue
            histogram[_bucket(len(prepared.token_ids))] += 1
            if len(prompts) < SHOWN_PROMPTS:
                prompts.append(
                    {"row_index": row.index, "num_tokens": len(prepared.token_ids), "text": renderer.render(row.text)}
                )
    plan = _plan(spec, dataset, engine.max_model_len, engine.config)
    return DryRun(plan, prompts, sampled, dict(sorted(histogram.items())), rejected)


def _admitted(prepared: PreparedRow | RejectedRow, engine: Preflight, job_seed: int) -> PreparedRow | RejectedRow:
    """A prepared row as it is, or as what the engine would make of it."""
    if isinstance(prepared, RejectedRow):
        return prepared
    try:
        # The samples of a row differ in their seeds alone.
        for request in prepared.requests((), (0,), job_seed, ""):
            engine.check(request)
    except EngineError as error:
        return RejectedRow(prepared.row, error.code, str(error))
    return prepared


def _plan(spec: JobSpec, dataset: Dataset, max_model_len: int, config: EngineConfig) -> dict[str, Any]:
    # A prompt has a token at least.
    params = sampling_params(spec)
    per_row = min(params.max_tokens, max_model_len - 1)
    notes = list(dataset.notes)
    if per_row < params.max_tokens:
        notes.append(f"max_tokens {params.max_tokens} is beyond the context: answers end where that does")
    return {
        "job": spec.name,
        "files": len(dataset.files),
        "rows": dataset.num_rows,
        "samples per row": params.n,
        "text column": dataset.input.text_column,
        "rows per chunk": spec.chunk_rows or default_chunk_rows(dataset),
        "chunks": sum(1 for _ in plan_chunks(dataset, spec.chunk_rows)),
        "output tokens at most": dataset.num_rows * params.n * per_row,
        "target": config.target,
        "context, tokens": max_model_len,
        **_speculation(config.speculation),
        **({"notes": notes} if notes else {}),
    }


def _speculation(config: SpeculationConfig) -> dict[str, Any]:
    """The methods, and those of their options that say something."""
    values: dict[str, Any] = {"method": config.method, "row_methods": config.row_methods}
    for option, methods in OPTIONS_OF_METHODS.items():
        choice = OPTIONS_OF_CHOICES.get(option)
        if not set(methods).isdisjoint(config.methods) and (not choice or getattr(config, choice[0]) == choice[1]):
            values[option] = getattr(config, option)
    if "max_draft_tokens" in values:
        values["verify"] = config.verify
        if "medusa" not in config.methods:
            values["max_draft_tokens"] = config.depth
    return {name.replace("_", " "): value for name, value in values.items() if value not in (None, ())}


def _sampled_rows(dataset: Dataset) -> Iterator[list[Row]]:
    """Rows in small lists: all of a small dataset, else the beginnings of chunks spread over it."""
    per_place = -(-SAMPLED_ROWS // SAMPLED_PLACES)
    if dataset.num_rows <= SAMPLED_ROWS:
        chunks = list(plan_chunks(dataset))
        per_place = SAMPLED_ROWS
    else:
        total = sum(1 for _ in plan_chunks(dataset))
        chunks = list(islice(plan_chunks(dataset), 0, None, max(1, total // SAMPLED_PLACES)))[:SAMPLED_PLACES]
    files = {file.index: file for file in dataset.files}
    for chunk in chunks:
        left = per_place
        for rows in read_chunk(files[chunk.file_index], chunk, dataset.input):
            yield rows[:left]
            left -= len(rows)
            if left <= 0:
                break


def _bucket(num_tokens: int) -> int:
    return max(16, 1 << (num_tokens - 1).bit_length())


def _parts(result: DryRun) -> Iterator[Passage | Fields | Table]:
    """The dry run for people: the prompts, the plan, the lengths of prompts, and what would fail."""
    for prompt in result.prompts:
        yield Passage(f"row {prompt['row_index']}, {prompt['num_tokens']} tokens", prompt["text"])
    plan = dict(result.plan)
    if "notes" in plan:
        plan["notes"] = "; ".join(plan["notes"])
    yield Fields(plan, title="plan")
    most = max(result.histogram.values(), default=1)
    rows = [
        (f"<= {bound}", count, "#" * max(1, round(BAR_WIDTH * count / most)))
        for bound, count in result.histogram.items()
    ]
    yield Table(("prompt tokens", "rows", ""), rows, title=f"prompt tokens of {result.num_sampled} sampled rows")
    if result.rejected:
        columns = ("row_index", "error_code", "error_message")
        shown = [[row[column] for column in columns] for row in result.rejected[:10]]
        which = f"{len(result.rejected)}" if result.histogram else "all"
        yield Table(columns, shown, title=f"{which} of the sampled rows would become errors")
