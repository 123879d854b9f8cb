"""Following a job that others work on."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from runner.errors import ExitCode
from runner.output.console import note
from runner.output.jobs import nobody_works, show_job
from runner.output.output import Output
from runner.output.progress import Follower, JsonDisplay, make_display
from runner.output.summary import JobSummary, exit_code_of, summary_of
from storage.records import ChunkState

if TYPE_CHECKING:
    from storage.store.store import Store

DRAIN_SECONDS = 10.0
"""How long the counts of a job that was ended are followed while workers record what they finished of it."""


def watch_job(store: Store, job_id: str, output: Output) -> ExitCode:
    """Show a job's progress until it is terminal; returns its exit code (interrupted: the job itself goes on)."""

    def read() -> JobSummary:
        return summary_of(store, store.jobs.get(job_id))

    first = read()
    if first.interrupted:
        note(f"interrupted: {nobody_works(first.name)}")
    elif not first.state.terminal and store.telemetry.activity(job_id).nobody:
        note("no worker is alive on this store: start `nightdraft worker` and `nightdraft scheduler`")
    try:
        with JsonDisplay() if output.as_json else make_display() as display:
            follower, emitted = Follower(read, display), _Emitted(store, job_id)
            give_up = math.inf
            while True:
                summary, pause = follower.refresh(tokens=emitted.read())
                if summary.state.terminal:
                    give_up = min(give_up, time.monotonic() + DRAIN_SECONDS)
                    if not summary.chunks.get(ChunkState.RUNNING) or time.monotonic() >= give_up:
                        break
                time.sleep(pause)
    except KeyboardInterrupt:
        note("no longer watching; the job goes on")
        return ExitCode.INTERRUPTED
    if not output.as_json:  # of JSON the last line says the same
        show_job(output, summary, store.results.error_groups(job_id))
    return exit_code_of(store.jobs.get(job_id), summary.counts.num_errors)


class _Emitted:
    """Tokens that workers have emitted for a job since this began, those of unfinished rows among them."""

    def __init__(self, store: Store, job_id: str) -> None:
        self._store = store
        self._job_id = job_id
        self._total: int | None = None
        self._counts: dict[str, int] = {}

    def read(self) -> int | None:
        """None as long as no worker has told of any."""
        for sample in self._store.telemetry.latest_engine_samples():
            before = self._counts.get(sample.worker_id, sample.tokens.num_output_tokens)
            self._counts[sample.worker_id] = sample.tokens.num_output_tokens
            if sample.job_id == self._job_id:
                self._total = (self._total or 0) + max(0, sample.tokens.num_output_tokens - before)
        return self._total
