"""Runs in processes of their own: killed by a signal, killed by a row, or where others cannot see them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from storage.records import ChunkState, JobState
from storage.store.store import Store
from tests.support.cli import Cli

WritePrompts = Callable[..., Path]
MAIN = "from runner.cli import main; main()"
SLOW = "scripted:delay_ms=25,eos_every=0"
APART = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
"""A PID namespace with a /proc of its own, as a container has."""
NUMBERED = 'while [ $(sh -c "echo \\$\\$") -lt $0 ]; do :; done; "$@"'
"""Runs a command in a process with a number above $0: two of them have none in common."""
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
FORKS = """
import os, sys
import workers.engine.async_engine, runner.cli, runner.jobs.run
codes = []
for _ in range({times}):
    if not (child := os.fork()):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        runner.cli.main()
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(codes)
"""
"""The same command several times in a row, the imports once."""


def command(store: str, path: Path, target: str, *arguments: str) -> list[str]:
    return ["run", str(path), "--target", target, "--name", "k", "--store", store, "--max-tokens", "12", *arguments]


class Launch:
    """Starts `nightdraft` in processes of their own, and leaves none of them behind."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[str]] = []

    def __call__(self, arguments: Sequence[str], *, inside: Sequence[str] = ()) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*inside, sys.executable, "-c", MAIN, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self._folder,
            env=ENVIRONMENT,
        )
        self._processes.append(process)
        return process

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    launch = Launch(tmp_path)
    yield launch
    launch.end()


def wait_for(store: Store, process: subprocess.Popen[str], condition: Callable[[str], bool]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        job = store.jobs.find("k")
        if job is not None and condition(job.id):
            return
        time.sleep(0.05)
    raise AssertionError(f"it did not happen: {process.communicate()}")


@pytest.fixture
def killed(cli: Cli, launch: Launch, write_prompts: WritePrompts) -> Cli:
    """The store of a run that was killed with some rows recorded and chunks in its hands."""
    path = write_prompts([f"p{n}" for n in range(40)])
    process = launch(command(cli.store, path, SLOW, "--chunk-rows", "8", "--set", "engine.max_batch=4"))
    with Store.open(cli.store) as store:
        wait_for(store, process, lambda job: store.jobs.progress(job).counts.num_ok > 0)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert store.jobs.progress(store.jobs.get("k").id).chunks[ChunkState.RUNNING] > 0
    return cli


def copies(cli: Cli) -> Callable[[str], Cli]:
    def copy(name: str) -> Cli:
        for file in cli.folder.glob("jobs.db*"):
            shutil.copy(file, cli.folder / file.name.replace("jobs", name))
        other = Cli(cli.folder)
        other.store = f"sqlite:///{cli.folder / name}.db"
        return other

    return copy


def test_every_command_takes_back_first_what_a_killed_run_held(killed: Cli) -> None:
    copy = copies(killed)
    run = ("run", "prompts.parquet", "--target", SLOW, "--name", "k", "--max-tokens", "12", "--chunk-rows", "8")

    shown = copy("status")("status", "k").stdout
    assert "interrupted" in shown
    assert "nobody works on it: give the same `nightdraft run` command again" in shown
    assert "running" not in shown
    (listed,) = copy("list").json("status")
    assert (listed["state"], listed["interrupted"], "running" in listed["chunks"]) == ("in_progress", True, False)

    refused = copy("export")("export", "k", "-o", "x.parquet", code=2).stderr
    assert "was interrupted" in refused
    assert "--partial" in refused
    assert "wait" not in refused

    cancelled = copy("cancel")
    assert cancelled.json("cancel", "k")["state"] == "cancelled"
    assert cancelled.json("resume", "k")["chunks"] > 0

    retried = copy("retry")
    assert retried.json("cancel", "k")["state"] == "cancelled"
    assert "no failed rows" in retried("retry", "k", "--failed").stdout

    resumed = copy("resume").json("resume", "k")
    assert resumed["chunks"] > 0

    # The same before anybody looked: the job is being cancelled, and its worker is dead.
    late = copy("late")
    with Store.open(late.store) as store:
        assert store.jobs.cancel(store.jobs.get("k").id) is JobState.CANCELLING
    assert late.json("status", "k")["state"] == "cancelled"
    done = late.json(*run, "--set", "engine.max_batch=4")
    assert (done["state"], done["num_ok"]) == ("completed", 40)


def test_a_row_that_kills_its_process_is_recorded_after_the_third_death(cli: Cli, write_prompts: WritePrompts) -> None:
    prompts = [f"p{n}" if n != 6 else "POISON" for n in range(16)]
    path = write_prompts(prompts, id=[f"row {n}" for n in range(16)], category=["a", "b"] * 8)
    arguments = command(cli.store, path, "scripted:crash_on=POISON", "--id-column", "id", "--chunk-rows", "16")
    runs = subprocess.run(
        [sys.executable, "-c", FORKS.format(times=4), *arguments],
        capture_output=True,
        text=True,
        cwd=cli.folder,
        env=ENVIRONMENT,
        check=False,
    )
    assert runs.stdout.strip() == "[139, 139, 139, 3]", runs.stderr
    assert "run one at a time" in runs.stderr
    (error,) = cli.json("sql", "SELECT row_index, error_code, row_id, carried FROM results WHERE status = 'error'")
    assert (error["row_index"], error["error_code"], error["row_id"]) == (6, "worker_crashed", "row 6")
    assert json.loads(error["carried"]) == {"category": "a"}
    assert cli.json("status", "k")["num_ok"] == 15


@pytest.mark.service
def test_two_runs_that_cannot_see_each_other_leave_each_other_s_rows_alone(
    cli: Cli, launch: Launch, postgres_url: str, write_prompts: WritePrompts
) -> None:
    """As in two containers: one has every chunk, the other nothing to do and no process of the first one's number."""
    if shutil.which(APART[0]) is None or subprocess.run([*APART, "true"], capture_output=True, check=False).returncode:
        pytest.skip("PID namespaces cannot be made here")
    path = write_prompts([f"p{n}" for n in range(24)])
    target = "scripted:delay_ms=8,eos_every=0"
    arguments = command(postgres_url, path, target, "--chunk-rows", "8", "--set", "engine.max_batch=1")
    with Store.open(postgres_url) as store:
        runs = [launch(arguments, inside=(*APART, "sh", "-c", NUMBERED, str(number))) for number in (50, 90)]
        for run in runs:
            wait_for(store, run, lambda job: {worker.pid > 90 for worker in store.telemetry.workers()} == {False, True})
        for run in runs:
            _, errors = run.communicate(timeout=90)
            assert run.returncode == 0, errors
            assert "left behind" not in errors
        job = store.jobs.get("k")
        assert [chunk.attempts for chunk in store.chunks.of_job(job.id)] == [0, 0, 0]
        assert (store.jobs.progress(job.id).counts.num_ok, store.jobs.progress(job.id).counts.num_errors) == (24, 0)


@pytest.mark.parametrize("happened", ["deleted", "replaced"])
def test_a_store_that_vanishes_under_a_run_ends_it(
    launch: Launch, tmp_path: Path, write_prompts: WritePrompts, happened: str
) -> None:
    path = write_prompts([f"row {number}" for number in range(400)])
    process = launch(command("own.db", path, SLOW))
    store = tmp_path / "own.db"
    with Store.open(f"sqlite:///{store}") as opened:
        wait_for(opened, process, lambda job_id: opened.jobs.progress(job_id).counts.num_ok > 0)
    if happened == "replaced":
        shutil.copy(store, tmp_path / "other.db")
        (tmp_path / "other.db").replace(store)
    else:
        store.unlink()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"error: the file of the store sqlite:///own.db was {happened} while it was in use" in errors
    assert "Traceback" not in errors
    assert store.exists() == (happened == "replaced")
