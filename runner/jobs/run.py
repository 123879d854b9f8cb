"""What `nightdraft run` does around the run itself: submit, interrupt, export, report."""

from __future__ import annotations

import threading
from pathlib import Path

from runner.errors import ExitCode
from runner.jobs.export import export_path, export_to
from runner.jobs.local import LocalRun
from runner.jobs.submit import submit_job
from runner.output.console import note
from runner.output.jobs import show_run
from runner.output.logs import logging_to_stderr
from runner.output.output import Output
from runner.output.progress import make_display
from runner.output.summary import exit_code_of, summary_of
from runner.paths import output_file, require_folder, require_no_input
from runner.stores import open_store
from storage.files.export import require_replaceable
from storage.records import Job, JobState
from storage.spec import JobSpec
from storage.store.store import SERVICE_PATIENCE, Store


def run_command(
    spec: JobSpec,
    store_value: str,
    output: Output | None,
    *,
    new: bool,
    out: str | None = None,
    force: bool = False,
    verbose: bool,
) -> ExitCode:
    """Run a job to its end in this process, and show on `output` what became of it. Returns the exit code."""
    if out is not None:
        _require_output(export_path(out, str(spec.name)), spec)
    with open_store(store_value, patience=SERVICE_PATIENCE) as store:
        submission = submit_job(store, spec, new=new, models_here=True)
        if out is not None:
            require_replaceable(Path(export_path(out, submission.job.name)).expanduser(), submission.job, force=force)
        if submission.resumed and submission.job.state.terminal:
            note(
                f"job {submission.job.name} is {submission.job.state} already, nothing is generated; --new starts anew"
            )
        with logging_to_stderr(verbose=verbose), make_display() as display:
            outcome = LocalRun(store, submission.job, threading.Event()).run(display)
        summary = summary_of(store, outcome.job)
        if output is not None:
            show_run(output, summary, store.results.error_groups(outcome.job.id), outcome.tokens_per_second)
        if summary.draft_warning is not None and outcome.tokens_per_second is not None:
            note(f"warning: {summary.draft_warning}")
        if out is not None:
            _export(store, outcome.job, export_path(out, outcome.job.name), force=force)
        if not outcome.job.state.terminal:
            note("interrupted: finished rows are recorded; the same command goes on from here")
        elif summary.counts.num_errors:
            note(f"failed rows: nightdraft errors {outcome.job.name}")
        return exit_code_of(outcome.job, summary.counts.num_errors)


def _require_output(out: str, spec: JobSpec) -> None:
    """Raise `UsageError` for an --out that would fail after the run."""
    path = output_file(out)
    require_no_input(path, spec.input.paths)
    require_folder(path)


def _export(store: Store, job: Job, path: str, *, force: bool) -> None:
    if job.state is not JobState.COMPLETED:
        note(f"not exported, since the job is {job.state}; see: nightdraft export {job.name} --partial --out {path}")
        return
    export_to(store, job, path, token_ids=job.spec.keep_token_ids, force=force)
    note(f"results: {path}")
