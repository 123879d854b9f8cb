"""`nightdraft worker` with an engine that starts at once: `worker_process.py BROKER STORE CONCURRENCY`."""

from __future__ import annotations

import sys

from tests.system.light_engine import engine_for
from workers.app import run_worker

if __name__ == "__main__":
    broker, store, concurrency = sys.argv[1:]
    sys.exit(run_worker(broker, store, int(concurrency), factory=engine_for))
