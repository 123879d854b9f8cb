"""`nightdraft run` that is stopped, killed, or broken by a row, and what the next one makes of it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from runner.jobs.local import LocalRun
from runner.jobs.submit import submit_job
from runner.output.progress import JsonDisplay
from runner.spec.parse import parse_spec
from storage.records import ChunkState, JobState
from storage.store.store import Store
from tests.support.cli import TARGET, Cli
from tests.support.records import claim_next
from tests.support.specs import MINIMAL

WritePrompts = Callable[..., Path]


@pytest.fixture
def prompts(write_prompts: WritePrompts) -> Path:
    return write_prompts([f"prompt {n}" for n in range(20)], category=["a", "b"] * 10)


def test_a_row_that_breaks_the_engine_becomes_an_error_and_the_others_finish(
    cli: Cli, write_prompts: WritePrompts
) -> None:
    path = write_prompts([f"p{n}" if n != 2 else "POISON" for n in range(5)], category=list("abcde"))
    target = "scripted:fail_on=POISON"
    arguments = ("--max-tokens", "4", "--name", "poison", "--out", "poison.parquet")
    result = cli("run", str(path), "--target", target, *arguments, code=3)
    assert "Traceback" not in result.stderr
    assert result.stderr.count("the batch holds 'POISON'") == 3, "twice in company, once alone"
    (row,) = cli.json("errors", "poison")
    assert (row["row_index"], row["error_code"]) == (2, "engine_error")
    assert row["error_message"] == "the engine failed: RuntimeError: scripted failure: the batch holds 'POISON'"
    (kept,) = cli.json("sql", "SELECT carried FROM results WHERE status = 'error'")
    assert json.loads(kept["carried"]) == {"category": "c"}
    assert pq.read_table(cli.folder / "poison.parquet")["category"].to_pylist() == list("abcde")


TOO_BIG = ("--set", "engine.kv_blocks=1000000000000", "--name", "big")
"""No machine has that much memory, and only loading finds out."""


def test_an_engine_that_cannot_be_loaded_fails_the_job_with_the_reason(cli: Cli, prompts: Path) -> None:
    for _ in range(2):  # the same command tries again: it may have been mended
        result = cli("run", str(prompts), "--target", TARGET, *TOO_BIG, code=2)
        (line,) = [line for line in result.stderr.splitlines() if "allocate" in line]
        assert line.startswith("ERROR: job big cannot run: load_failed: the engine could not be loaded: ")
        assert "Traceback" not in result.stderr
        job = cli.json("status", "big")
        assert (job["state"], job["error_code"], job["num_errors"]) == ("failed", "load_failed", 0)
    assert cli.json("resume", "big")["chunks"] > 0


def test_a_run_that_cannot_load_its_engine_leaves_the_job_to_the_one_that_could(cli: Cli, prompts: Path) -> None:
    (cli.folder / "big.yaml").write_text(
        f"name: big\ninput: {{paths: {prompts.name}}}\nchunk_rows: 4\n"
        f"engine: {{target: '{TARGET}', kv_blocks: 1000000000000}}\n"
    )
    cli("submit", "big.yaml")
    with Store.open(cli.store) as store:
        job = store.jobs.get("big")
        other = claim_next(store, "another", 60.0, job.id)
        assert other is not None
        result = cli("run", "big.yaml", code=2)
        assert "goes on in another process" in result.stderr
        assert "Traceback" not in result.stderr
        assert store.jobs.get("big").state is JobState.IN_PROGRESS
        assert store.chunks.heartbeat(other.lease, 60.0).alive


def test_tokens_are_counted_before_the_first_row_is_through(cli: Cli, write_prompts: WritePrompts) -> None:
    path = write_prompts(["one", "two"])
    spec = parse_spec(
        {
            **MINIMAL,
            "name": "long",
            "input": {"paths": str(path)},
            "engine": {"target": "scripted:delay_ms=30,eos_every=0"},
            "sampling": {"max_tokens": 400},
        }
    )
    stop = threading.Event()
    seen: list[object] = []

    class StopOnFirstRate(JsonDisplay):
        def update(self, summary, rates, note="") -> None:  # type: ignore[no-untyped-def]
            if rates.tokens_per_second:
                seen.append((summary.num_done, rates.rows_per_second, rates.eta_seconds))
                stop.set()

    with Store.open(cli.store) as store:
        LocalRun(store, submit_job(store, spec).job, stop).run(StopOnFirstRate())
    assert seen[0] == (0, None, None)


def test_what_a_killed_run_left_behind_is_said_once_and_other_jobs_are_silent(cli: Cli, prompts: Path) -> None:
    for name in ("mine", "other"):
        (cli.folder / f"{name}.yaml").write_text(
            f"name: {name}\ninput: {{paths: prompts.parquet}}\nengine: {{target: '{TARGET}'}}\nchunk_rows: 4\n"
        )
        cli("submit", f"{name}.yaml")
    with Store.open(cli.store) as store:
        mine, other = store.jobs.get("mine"), store.jobs.get("other")
        for job in (mine, mine, other):
            assert claim_next(store, "killed", 60.0, job.id) is not None
        store.chunks.expire_leases("killed")
        errors = cli("run", "mine.yaml").stderr
        assert store.jobs.progress(other.id).chunks[ChunkState.RUNNING] == 1, "left to those who work on that job"
    assert errors.count("WARNING") == errors.count("left behind when it was killed or failed") == 1
    assert not re.search("other|chunk|" + "|".join((mine.id, other.id)), errors)


def test_stop_drains_and_the_next_run_goes_on(tmp_path: Path, write_prompts: WritePrompts) -> None:
    path = write_prompts([f"p{n}" for n in range(40)])
    spec = parse_spec(
        {
            **MINIMAL,
            "name": "drained",
            "input": {"paths": str(path)},
            "engine": {"target": "scripted:delay_ms=20,eos_every=0", "max_batch": 4},
            "sampling": {"max_tokens": 10},
            "chunk_rows": 8,
        }
    )
    stop = threading.Event()

    class StopOnFirstResult(JsonDisplay):
        def update(self, summary, rates, note="") -> None:  # type: ignore[no-untyped-def]
            if summary.num_done:
                stop.set()

    with Store.open(f"sqlite:///{tmp_path}/d.db") as store:
        job = submit_job(store, spec).job
        outcome = LocalRun(store, job, stop).run(StopOnFirstResult())
        assert outcome.job.state is JobState.IN_PROGRESS
        done = store.jobs.progress(job.id).counts.num_ok
        assert 0 < done < 40
        outcome = LocalRun(store, submit_job(store, spec).job, threading.Event()).run(JsonDisplay())
        assert outcome.job.state is JobState.COMPLETED
        assert len(list(store.results.iterate(job.id))) == 40


def start(cli: Cli, path: Path, target: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "from runner.cli import main; main()", "run", str(path), "--target", target]
    command += [
        "--max-tokens",
        "12",
        "--chunk-rows",
        "8",
        "--name",
        "k",
        "--set",
        "engine.max_batch=4",
        "--store",
        cli.store,
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cli.folder)


def wait_for_results(cli: Cli, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None:
        with Store.open(cli.store) as store:
            job = store.jobs.find("k")
            if job is not None and store.jobs.progress(job.id).counts.num_ok:
                return
        time.sleep(0.1)
    raise AssertionError(f"no results: {process.communicate()}")


def test_ctrl_c_drains_with_130_and_kill_9_loses_nothing(cli: Cli, write_prompts: WritePrompts) -> None:
    path = write_prompts([f"p{n}" for n in range(64)])
    target = "scripted:delay_ms=15,eos_every=0"
    for number, code in ((signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)):
        process = start(cli, path, target)
        wait_for_results(cli, process)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
        assert process.returncode == code, err
        shown = cli("status", "k").stdout
        assert ("interrupted" in shown, "nobody works on it" in shown) == (True, True)
        assert "was interrupted" in cli("export", "k", "-o", "k.parquet", code=2).stderr
    process = start(cli, path, target)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "64 of 64" in out
