"""Jobs and results for the store's tests, small and varied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from storage.records import Acceptance, Chunk, ChunkState, InputFile, Job, JobState, Result, RowStatus
from storage.spec import InputSpec, JobSpec
from storage.store.store import Store

LEASE = 60.0
IN_FLIGHT = (ChunkState.DISPATCHED, ChunkState.RUNNING)


def make_spec(name: str, **changes: Any) -> JobSpec:
    values: dict[str, Any] = {
        "name": name,
        "input": InputSpec(("/data/in.parquet",), prompt_column="prompt"),
        "engine": {"target": "m"},
        "sampling": {},
    }
    return JobSpec(**values | changes)


def make_job(name: str = "job", *, spec: dict[str, Any] | None = None, **changes: Any) -> Job:
    """`spec`: fields of its spec, by name."""
    values: dict[str, Any] = {
        "id": f"id-{name}",
        "name": name,
        "state": JobState.QUEUED,
        "spec": make_spec(name, **spec or {}),
        "spec_hash": "hash",
        "num_rows": 10,
        "num_samples": 1,
        "created_at": datetime.now(UTC),
    }
    return Job(**values | changes)


def plan(job: Job, chunk_rows: int) -> Iterator[Chunk]:
    for index, start in enumerate(range(0, job.num_rows, chunk_rows)):
        yield Chunk(0, job.id, index, 0, start, start, min(chunk_rows, job.num_rows - start))


def add_job(store: Store, name: str = "job", *, chunk_rows: int = 5, **changes: Any) -> Job:
    job = make_job(name, **changes)
    file = InputFile(0, "/data/in.parquet", 123, "1", "prompt: string", (job.num_rows,), 0)
    store.jobs.create(job, [file], plan(job, chunk_rows))
    return job


def claim_next(store: Store, worker: str, lease_seconds: float = LEASE, job_id: str | None = None) -> Chunk | None:
    """The oldest chunk that nobody has, claimed; None when there is none."""
    while waiting := store.chunks.pending(job_id, or_dispatched=True):
        for chunk in waiting:
            claimed = store.chunks.claim(chunk.message, worker, lease_seconds)
            if claimed is not None:
                return claimed
    return None


def claim(store: Store, job: Job, worker: str = "worker") -> Chunk:
    chunk = claim_next(store, worker, LEASE, job.id)
    assert chunk is not None
    return chunk


def answer(row: int, sample: int = 0, **changes: Any) -> Result:
    """A success with statistics that differ by row and satisfy every invariant."""
    accepted, steps = row % 4, 3 + row % 2
    values: dict[str, Any] = {
        "row_index": row,
        "sample": sample,
        "status": RowStatus.OK,
        "output_text": f"answer {row}.{sample}",
        "finish_reason": "eos",
        "carried": {"category": ("qa", "code", "chat")[row % 3], "n": row % 2},
        "num_prompt_tokens": 7,
        "num_output_tokens": steps + accepted,
        "method": ("ngram", "none")[row % 2],
        "temperature": (0.0, 0.7)[row % 2],
        "seed": row,
        "draft_seconds": row / 4,
        "verify_seconds": 0.5,
        "acceptance": Acceptance(
            num_spec_steps=steps,
            num_draft_tokens=2 * accepted + row % 3,
            num_accepted_draft_tokens=accepted,
            num_trimmed_draft_tokens=0,
            num_output_tokens=steps + accepted,
            acceptance_histogram=(steps - 1, *([0] * (accepted - 1)), 1) if accepted else (steps,),
            reached_per_position=(1,) * max(accepted, row % 3),
            accepted_per_position=(1,) * accepted,
        ),
    }
    return Result(**values | changes)


def failure(row: int, sample: int = 0, code: str = "null_prompt", message: str | None = "no prompt") -> Result:
    return Result(row, sample, RowStatus.ERROR, error_code=code, error_message=message)


def pairs(chunk: Chunk, num_samples: int = 1) -> list[tuple[int, int]]:
    return [(row, s) for row in range(chunk.start_row, chunk.start_row + chunk.num_rows) for s in range(num_samples)]


def work(store: Store, job: Job, *, bad_rows: Sequence[int] = ()) -> None:
    """Answer every chunk of a job that waits, rows in `bad_rows` with an error, and end the job."""
    while (chunk := claim_next(store, "worker", LEASE, job.id)) is not None:
        done = store.results.recorded(chunk)
        todo = [pair for pair in pairs(chunk, job.num_samples) if pair not in done]
        store.results.write(chunk.lease, [failure(*p) if p[0] in bad_rows else answer(*p) for p in reversed(todo)])
        assert store.chunks.finish(chunk.lease)
    assert store.jobs.finalize_if_done(job.id) is not None
