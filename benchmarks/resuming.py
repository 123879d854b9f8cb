"""A run killed with SIGKILL and started again, with every method: the same tokens as an undisturbed plain run?"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.decode_once import MODEL, PROMPTS
from benchmarks.exactness import with_random_drafts
from benchmarks.machine import describe
from storage.store.store import Store
from workers.engine import SpeculationConfig

ROWS, TOKENS = 32, 16
KILL_AFTER = 3
"""Results on record at which the process is killed: later rows are in the batch, in the queue and not yet read."""

Tokens = dict[tuple[int, int], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Resumed:
    tokens: Tokens
    recorded_at_kill: int


def run() -> None:
    print(f"resuming: {MODEL}, {ROWS} rows of mixed sampling, {TOKENS} tokens each; {describe()}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _compare(folder, with_random_drafts(folder))


def _compare(folder: Path, methods: Mapping[str, SpeculationConfig]) -> None:
    """Print, for each method, how many rows differ. Raises `RuntimeError` when a run does not complete."""
    prompts = _write_prompts(folder / "prompts.parquet")
    print("float32, kill -9 and the same command again: rows that differ from plain decoding left alone", flush=True)
    expected = _Job(folder, prompts, "undisturbed", SpeculationConfig()).finish()
    for method, speculation in methods.items():
        resumed = _killed_and_resumed(_Job(folder, prompts, method, speculation))
        rows = [key for key in expected if resumed.tokens.get(key) != expected[key]]
        print(f"  {method:<14} {len(rows)} of {ROWS} (killed at {resumed.recorded_at_kill} recorded)", flush=True)


def _write_prompts(path: Path) -> Path:
    rng = random.Random(2)
    params = [
        {"temperature": (0.0, 0.7, 1.0)[row % 3], "top_p": rng.choice((1.0, 0.9)), "repetition_penalty": 1.1}
        for row in range(ROWS)
    ]
    pq.write_table(pa.table({"prompt": PROMPTS[:ROWS], "sampling_params": [json.dumps(p) for p in params]}), path)
    return path


class _Job:
    """One job of its own, run by the command that users run."""

    def __init__(self, folder: Path, prompts: Path, name: str, speculation: SpeculationConfig) -> None:
        self.name = name.replace(" ", "-")
        self.store = f"sqlite:///{folder}/resuming.db"
        self.file = folder / f"{self.name}.json"
        self.log = self.file.with_suffix(".log")
        self.file.write_text(json.dumps(self._spec(prompts, speculation)))

    def _spec(self, prompts: Path, speculation: SpeculationConfig) -> dict[str, Any]:
        return {
            "name": self.name,
            "input": {"paths": [str(prompts)]},
            "engine": {
                "target": MODEL,
                "dtype": "float32",
                "max_batch": 4,
                "max_model_len": 1024,
                "speculation": asdict(speculation),
            },
            "sampling": {"max_tokens": TOKENS},
            "seed": 7,
            "chunk_rows": 8,
            "keep_token_ids": True,
        }

    def start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", "from runner.cli import main; main()", "run", str(self.file)]
        with self.log.open("ab") as log:
            return subprocess.Popen([*command, "--store", self.store, "--json"], stdout=log, stderr=log)

    def finish(self) -> Tokens:
        if self.start().wait():
            raise RuntimeError(self.log.read_text())
        with Store.open(self.store) as store:
            job = store.jobs.get(self.name)
            return {(r.row_index, r.sample): tuple(r.output_token_ids or ()) for r in store.results.iterate(job.id)}

    def recorded(self) -> int:
        with Store.open(self.store) as store:
            job = store.jobs.find(self.name)
            return store.jobs.progress(job.id).counts.num_ok if job is not None else 0


def _killed_and_resumed(job: _Job) -> Resumed:
    process = job.start()
    while job.recorded() < KILL_AFTER:
        if process.poll() is not None:
            raise RuntimeError(f"job {job.name!r} ended before it could be killed: {job.log.read_text()}")
        time.sleep(0.05)
    process.kill()
    process.wait()
    recorded = job.recorded()
    if recorded == ROWS:
        raise RuntimeError(f"job {job.name!r} was killed too late: every row was recorded")
    return Resumed(job.finish(), recorded)
