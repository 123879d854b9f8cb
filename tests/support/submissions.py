"""Small datasets, specs, and the two ends of the wire that the scheduler talks to."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from scheduler.errors import BrokerUnavailable
from scheduler.intake.dataset import inspect
from scheduler.intake.submission import Submission, submit
from storage.records import Chunk, ChunkMessage, Result, RowStatus
from storage.spec import InputSpec, JobSpec
from storage.store.store import Store
from tests.support.records import claim_next


def write_prompts(path: Path, rows: int = 10, *, row_group_size: int = 1000, **columns: Any) -> Path:
    """A Parquet file with a prompt column (and any others), its directory made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({"prompt": [f"prompt {n}" for n in range(rows)], **columns})
    pq.write_table(table, path, row_group_size=row_group_size)
    return path


def job_spec(name: str = "night", **fields: Any) -> JobSpec:
    """A spec as the runner hands it over, as far as the scheduler cares."""
    values: dict[str, Any] = {
        "name": name,
        "input": InputSpec(("prompts.parquet",)),
        "engine": {"target": "scripted:vocab=256", "speculation": {"method": "none", "draft": None}},
        "sampling": {"temperature": 0.0, "n": 1, "stop": ["a", "b"]},
        **fields,
    }
    return JobSpec(**values)


class MemoryPublisher:
    """A broker in a list: `messages` wait until somebody takes them; `down` makes every call fail."""

    def __init__(self, *, lasting: bool = True) -> None:
        self.lasting = lasting
        self.messages: deque[ChunkMessage] = deque()
        self.published = 0
        self.down = False
        self.fail_after: int | None = None
        self.closed = False

    def publish(self, message: ChunkMessage) -> None:
        if self.down or self.fail_after == 0:
            raise BrokerUnavailable("broker memory: gone")
        if self.fail_after is not None:
            self.fail_after -= 1
        if not self.lasting and message in self.messages:
            return
        self.published += 1
        self.messages.append(message)

    def waiting(self) -> int:
        if self.down:
            raise BrokerUnavailable("broker memory: gone")
        return len(self.messages)

    def close(self) -> None:
        self.closed = True


def complete(store: Store, chunk: Chunk, *, errors: int = 0) -> None:
    """Record a result for every row of a claimed chunk (the first `errors` of them as errors) and finish it."""
    batch = [
        Result(row, 0, RowStatus.ERROR, error_code="null_prompt", error_message="the prompt is null")
        if place < errors
        else Result(row, 0, RowStatus.OK, output_text="x", finish_reason="stop")
        for place, row in enumerate(range(chunk.start_row, chunk.start_row + chunk.num_rows))
    ]
    store.results.write(chunk.lease, batch)
    assert store.chunks.finish(chunk.lease)


def work_off(store: Store, message: ChunkMessage, *, errors: int = 0) -> bool:
    """What a worker does with a message; False when the message was stale."""
    chunk = store.chunks.claim(message, "worker-1", 60.0)
    if chunk is None:
        return False
    complete(store, chunk, errors=errors)
    return True


def submitted(
    store: Store,
    path: Path,
    *,
    new: bool = False,
    limit: int | None = None,
    defaults: JobSpec | None = None,
    **fields: Any,
) -> Submission:
    asked = InputSpec((str(path),), limit=limit)
    return submit(store, job_spec(input=asked, **fields), inspect(asked), new=new, defaults=defaults)


def work_through(store: Store, job_id: str) -> None:
    while chunk := claim_next(store, "worker-1", 60.0, job_id):
        complete(store, chunk)
    store.jobs.finalize_if_done(job_id)
