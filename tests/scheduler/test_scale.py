from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

ROWS = 1_000_000
MAX_PEAK_MIB = 300

SCRIPT = """
import resource, sys
import anyio
from scheduler.dataset import inspect
from scheduler.service import Scheduler
from scheduler.submission import submit
from storage.records import InputSpec
from storage.store import Store
from tests.scheduler.helpers import MemoryPublisher, job_spec

async def dispatch(store, broker, job_id):
    async with anyio.create_task_group() as group:
        group.start_soon(Scheduler(store, broker, window=100_000, poll_seconds=0.05).serve)
        while store.pending_chunks(job_id, 1):
            await anyio.sleep(0.05)
        group.cancel_scope.cancel()

path, url = sys.argv[1:]
broker = MemoryPublisher()
with Store.open(url) as store:
    job = submit(store, job_spec(), inspect(InputSpec((path,)))).job
    anyio.run(dispatch, store, broker, job.id)
    assert len(broker.messages) == store.count_dispatched() == len(store.list_chunks(job.id))
    print(job.num_rows, len(broker.messages), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""


def test_a_million_rows_are_planned_and_dispatched_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "prompts.parquet"
    pq.write_table(pa.table({"prompt": [f"prompt {n}" for n in range(ROWS)]}), path, row_group_size=65_536)
    command = [sys.executable, "-c", SCRIPT, str(path), f"sqlite:///{tmp_path / 'store.db'}"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rows, messages, peak_mib = map(int, output.split())
    assert rows == ROWS
    assert messages < 5000
    assert peak_mib < MAX_PEAK_MIB
