"""One half of the jobs measurement in a process of its own; prints one JSON object.

python -m benchmarks.jobs_once dispatch INPUT.parquet STORE_URL     plan, store and publish every chunk
python -m benchmarks.jobs_once run INPUT.parquet STORE_URL          answer every row with a scripted model
"""

from __future__ import annotations

import json
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

import anyio

from scheduler.daemon.service import Scheduler
from scheduler.intake.dataset import inspect
from scheduler.intake.submission import submit
from storage.records import ChunkMessage, Job
from storage.spec import InputSpec, JobSpec
from storage.store.store import Store

TARGET = "scripted:eos_every=0,max_len=64"


class Broker:
    """A broker in a list, so that what is measured is the scheduler."""

    lasting = True

    def __init__(self) -> None:
        self.messages: list[ChunkMessage] = []

    def publish(self, message: ChunkMessage) -> None:
        self.messages.append(message)

    def waiting(self) -> int:
        return len(self.messages)

    def close(self) -> None:
        pass


def main() -> None:
    what, path, url = sys.argv[1:]
    with Store.open(url) as store:
        started = time.perf_counter()
        job = submit(store, _spec(path), inspect(InputSpec((path,)))).job
        submitted = time.perf_counter() - started
        report = anyio.run(_dispatch, store, job) if what == "dispatch" else _run(store, job)
    report |= {"rows": job.num_rows, "submit_seconds": submitted}
    report["peak_mib"] = _peak_mib()
    print(json.dumps(report))


def _peak_mib() -> int:
    status = Path("/proc/self/status")
    if status.exists():
        # Not ru_maxrss: on Linux a process begins with that of whoever started it, such as a large test session.
        peak = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(peak.split()[1]) // 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def _spec(path: str) -> JobSpec:
    return JobSpec.parse(
        {
            "name": "benchmark",
            "input": {"paths": [path], "prompt_column": "prompt"},
            "engine": {"target": TARGET, "max_batch": 256, "kv_memory": 2**26},
            "sampling": {"max_tokens": 1},
            "chat_template": False,
        }
    )


async def _dispatch(store: Store, job: Job) -> dict[str, Any]:
    broker = Broker()
    started = time.perf_counter()
    async with anyio.create_task_group() as group:
        group.start_soon(Scheduler(store, broker, window=100_000, poll_seconds=0.05).serve)
        while store.chunks.pending(job.id, 1):
            await anyio.sleep(0.05)
        group.cancel_scope.cancel()
    return {"messages": len(broker.messages), "seconds": time.perf_counter() - started}


def _run(store: Store, job: Job) -> dict[str, Any]:
    from runner.jobs.local import LocalRun
    from runner.output.progress import JsonDisplay

    model = _timed_model()
    started = time.perf_counter()
    with JsonDisplay() as display:
        LocalRun(store, job, threading.Event()).run(display)
    seconds = time.perf_counter() - started
    progress = store.jobs.progress(job.id)
    return {
        "seconds": seconds,
        "model_seconds": model[0],
        "ok": progress.counts.num_ok,
        "state": store.jobs.get(job.id).state,
    }


def _timed_model() -> list[float]:
    """Sums the time spent in the scripted model, which a real job would spend in the real one."""
    from workers.engine.models.executors.scripted import ScriptedExecutor

    seconds = [0.0]
    forward = ScriptedExecutor.forward

    def timed(self: ScriptedExecutor, *args: Any) -> Any:
        started = time.perf_counter()
        output = forward(self, *args)
        seconds[0] += time.perf_counter() - started
        return output

    ScriptedExecutor.forward = timed  # type: ignore[method-assign]
    return seconds


if __name__ == "__main__":
    main()
