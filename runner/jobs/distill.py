"""`nightdraft distill`: a job's answers become a folder that drafters learn from."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from runner.errors import ExitCode, UsageError
from runner.jobs.run import run_command
from runner.output.output import Fields, Output
from runner.stores import open_store
from storage.records import Job, JobState
from storage.spec import JobSpec
from storage.store.store import Store
from workers.rows.answers import Answer, answers
from workers.rows.settings import engine_config

PAGE = 1024
"""Answers that are written at a time."""


def distill(spec: JobSpec, store_value: str, output: Output, folder: Path, *, new: bool, verbose: bool) -> ExitCode:
    """Run the job, token ids kept, and write its answers. Returns the exit code of the run where that is not over.

    Raises what `run_command` and `write_answers` raise.
    """
    spec = replace(spec, keep_token_ids=True)
    code = run_command(spec, store_value, None, new=new, verbose=verbose)
    if code not in (ExitCode.OK, ExitCode.FAILED_ROWS):
        return code
    with open_store(store_value, create=False) as store:
        write_answers(store, store.jobs.get(str(spec.name)), folder, output)
    return code


def distill_job(reference: str, store_value: str, output: Output, folder: Path) -> ExitCode:
    """Write the answers of a job that has run."""
    with open_store(store_value, create=False) as store:
        write_answers(store, store.jobs.get(reference), folder, output)
    return ExitCode.OK


def write_answers(store: Store, job: Job, folder: Path, output: Output) -> None:
    """Write the answers of a completed job to `folder`, and show how many there are and what was left out.

    Raises `UsageError` when the job has not ended, kept no token ids, or has no answer to learn from.
    """
    if job.state is not JobState.COMPLETED:
        raise UsageError(f"job {job.name} is {job.state}: let it end first; the same command goes on from there")
    if not job.spec.keep_token_ids:
        raise UsageError(f"job {job.name} kept no token ids: run it with --set keep_token_ids=true, or distill anew")
    from workers.engine.measure.preflight import preview
    from workers.training.runs import ABOUT, ANSWERS

    config = engine_config(job.spec)
    target = preview(config)
    unusable: Counter[str] = Counter()
    folder.mkdir(parents=True, exist_ok=True)
    found = answers(store, job, target.tokenizer, target.max_model_len)
    counts = _write(folder / ANSWERS, _usable(found, unusable))
    if not counts["answers"]:
        reasons = ", ".join(f"{count} {reason}" for reason, count in unusable.items())
        raise UsageError(f"job {job.name} has no answer to learn from: {reasons}")
    hashes = [model["content_hash"] for model in store.telemetry.models(job.id) if model["role"] == "target"]
    about = {
        "target": config.target,
        "content_hash": hashes[0],
        "max_model_len": target.max_model_len,
        "job": job.name,
        **counts,
        "unusable": dict(unusable),
    }
    (folder / ABOUT).write_text(json.dumps(about, indent=2) + "\n")
    left_out = {f"left out, {reason}": count for reason, count in unusable.items()}
    output.show(about, Fields({**counts, **left_out, "folder": str(folder)}, title=f"answers of {job.name}"))


def _usable(found: Iterator[Answer], unusable: Counter[str]) -> Iterator[Answer]:
    for answer in found:
        if answer.problem is None:
            yield answer
        else:
            unusable[answer.problem] += 1


def _write(file: Path, usable: Iterator[Answer]) -> dict[str, int]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from workers.training.documents import ANSWER, CATEGORY, PROMPT, SCHEMA

    counts = {"answers": 0, "prompt_tokens": 0, "answer_tokens": 0}
    partial = file.with_name(file.name + ".partial")
    page: list[dict[str, Any]] = []
    with pq.ParquetWriter(partial, SCHEMA, compression="zstd") as writer:
        for answer in usable:
            category = (answer.carried or {}).get(CATEGORY)
            page.append(
                {
                    PROMPT: list(answer.prompt),
                    ANSWER: list(answer.tokens),
                    CATEGORY: category if isinstance(category, str) else None,
                }
            )
            counts["answers"] += 1
            counts["prompt_tokens"] += len(answer.prompt)
            counts["answer_tokens"] += len(answer.tokens)
            if len(page) == PAGE:
                writer.write_table(pa.Table.from_pylist(page, schema=SCHEMA))
                page.clear()
        writer.write_table(pa.Table.from_pylist(page, schema=SCHEMA))
    partial.replace(file)
    return counts
