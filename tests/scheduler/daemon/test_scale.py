from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.jobs import measure

ROWS = 1_000_000
MAX_PEAK_MIB = 300


def test_a_million_rows_are_planned_and_dispatched_in_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "prompts.parquet"
    pq.write_table(pa.table({"prompt": [f"prompt {n}" for n in range(ROWS)]}), path, row_group_size=65_536)
    report = measure("dispatch", path, f"sqlite:///{tmp_path / 'store.db'}")
    assert report["rows"] == ROWS
    assert 1000 < report["messages"] < 5000
    assert report["peak_mib"] < MAX_PEAK_MIB
