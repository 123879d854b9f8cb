"""Following a job that others work on."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from runner.errors import ExitCode
from runner.progress import Follower, JsonDisplay, make_display
from runner.summary import JobSummary, exit_code_of, summarise
from runner.tables import note
from runner.views import show_job

if TYPE_CHECKING:
    from storage.store import Store
    from storage.telemetry import WorkerInfo

ALIVE_SECONDS = 60
"""A worker that was not seen for longer counts as gone."""


def watch_job(store: Store, job_id: str, *, as_json: bool) -> ExitCode:
    """Show a job's progress until it is terminal; returns its exit code (interrupted: the job itself goes on)."""

    def read() -> JobSummary:
        return summarise(store.get_job(job_id), store.progress(job_id))

    if not read().state.terminal and not alive_workers(store):
        note("no worker is alive on this store: start `nightdraft worker` and `nightdraft scheduler`")
    try:
        with JsonDisplay() if as_json else make_display() as display:
            follower = Follower(read, display)
            summary, pause = follower.refresh()
            while not summary.state.terminal:
                time.sleep(pause)
                summary, pause = follower.refresh()
    except KeyboardInterrupt:
        note("no longer watching; the job goes on")
        return ExitCode.INTERRUPTED
    if not as_json:
        show_job(summary, store.error_groups(job_id), as_json=False)
    return exit_code_of(store.get_job(job_id), summary.num_errors)


def alive_workers(store: Store) -> list[WorkerInfo]:
    """Workers seen lately, in worker processes and in-process runs alike."""
    since = datetime.now(UTC) - timedelta(seconds=ALIVE_SECONDS)
    return [worker for worker in store.list_workers() if worker.last_seen >= since]
