"""What a job costs besides its model: a large Parquet file of short prompts, a scripted model, SQLite."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.machine import describe, foreign_load


def run(rows: int) -> None:
    print(f"\njobs: {rows} rows of short prompts, one token each, SQLite; {describe()}")
    with tempfile.TemporaryDirectory() as folder, foreign_load() as load:
        path = Path(folder) / "prompts.parquet"
        pq.write_table(pa.table({"prompt": [f"row {n}" for n in range(rows)]}), path, row_group_size=65_536)
        dispatched = measure("dispatch", path, f"sqlite:///{folder}/dispatch.db")
        done = measure("run", path, f"sqlite:///{folder}/run.db")
    print(
        f"  scheduler: planned in {dispatched['submit_seconds']:.2f} s, {dispatched['messages']} chunks dispatched in "
        f"{dispatched['seconds']:.2f} s, peak memory {dispatched['peak_mib']} MiB"
    )
    overhead = 1e6 * (done["seconds"] - done["model_seconds"]) / done["rows"]
    print(
        f"  run: {done['ok']} rows ok, {done['state']}; {overhead:.0f} microseconds per row besides the model "
        f"({1e6 * done['model_seconds'] / done['rows']:.0f} in it), peak memory {done['peak_mib']} MiB"
    )
    print(f"  other processes kept {load.foreign_cores:.2f} cores busy")


def measure(what: str, path: Path, url: str) -> dict[str, Any]:
    """Run one half in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.jobs_once", what, str(path), url]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    report: dict[str, Any] = json.loads(output.splitlines()[-1])
    return report
