"""Small jobs for tests of the workers: one Parquet file, a job record, its chunks."""

from __future__ import annotations

import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from storage.files.parquet import read_metadata
from storage.records import Chunk, Job, JobState, Result
from storage.spec import JobSpec
from storage.store.store import Store
from tests.support.fake_engine import Script
from tests.support.records import claim_next
from workers.chunks.chunk import ChunkOutcome, process_chunk
from workers.chunks.worker import Worker
from workers.hosting.shared import EngineHosts

LEASE = 30.0


def make_job(
    store: Store,
    folder: Path,
    columns: dict[str, Any],
    *,
    chunk_rows: int = 100,
    num_samples: int = 1,
    target: str = "fake",
    name: str = "job",
    input_section: dict[str, Any] | None = None,
    **spec: Any,
) -> Job:
    """A queued job over one file with these columns."""
    path = folder / f"{name}.parquet"
    pq.write_table(pa.table(columns), path)
    file = read_metadata(str(path)).as_input_file(0, 0)
    text = {"messages_column": "messages"} if "messages" in columns else {"prompt_column": "prompt"}
    full_spec = {
        "name": name,
        "input": {"paths": [str(path)], **(text if input_section is None else input_section)},
        "engine": {"target": target, "max_batch": 4},
        "sampling": {"max_tokens": 16, "n": num_samples},
        "seed": 0,
        "chat_template": False,
        "lease_seconds": LEASE,
        **spec,
    }
    job = Job(
        name, name, JobState.QUEUED, JobSpec.parse(full_spec), "hash", file.num_rows, num_samples, datetime.now(UTC)
    )
    starts = range(0, file.num_rows, chunk_rows)
    chunks = [
        Chunk(0, job.id, place, 0, start, start, min(chunk_rows, file.num_rows - start))
        for place, start in enumerate(starts)
    ]
    store.jobs.create(job, [file], chunks)
    return job


def claim(store: Store, job: Job, *, lease_seconds: float = LEASE) -> Chunk:
    chunk = claim_next(store, "test", lease_seconds, job.id)
    assert chunk is not None
    return chunk


def process_next(worker: Worker, job: Job) -> ChunkOutcome | None:
    """Have a worker process the job's oldest chunk that nobody has; None when there is none."""
    waiting = worker.store.chunks.pending(job.id, 1, or_dispatched=True)
    return worker.process(waiting[0].message) if waiting else None


def run_chunk(
    store: Store, job: Job, script: Script, *, chunk: Chunk | None = None, stop: threading.Event | None = None
) -> ChunkOutcome:
    """Process one chunk of the job with an engine of its own."""
    hosts = EngineHosts(script.factory)
    try:
        chunk = chunk or claim(store, job)
        return process_chunk(store, hosts, job, chunk, worker_id="test", stop=stop or threading.Event())
    finally:
        hosts.close()


def results(store: Store, job: Job) -> dict[tuple[int, int], Result]:
    found = list(store.results.iterate(job.id))
    by_key = {(result.row_index, result.sample): result for result in found}
    assert len(by_key) == len(found)
    return by_key


def texts(store: Store, job: Job) -> dict[int, str | None]:
    return {row: result.output_text for (row, _), result in results(store, job).items()}
