"""Disks that are full: one sentence, with what to do, and nothing is left behind. On a real, small file system."""

from __future__ import annotations

import random
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

from runner.jobs import local
from runner.jobs.local import LocalRun
from runner.output.progress import JsonDisplay
from storage.errors import StoreFull
from storage.records import JobState
from storage.store.store import Store
from tests.support.cli import TARGET, Cli
from tests.support.disks import SmallDisk

WritePrompts = Callable[..., Path]
TARGET_FOR_A_WHILE = "scripted:eos_every=0,delay_ms=2"


def test_what_does_not_fit_is_one_sentence_and_leaves_nothing(
    cli: Cli, write_prompts: WritePrompts, small_disk: SmallDisk
) -> None:
    numbers = random.Random(0)
    path = write_prompts([f"p{n}" for n in range(100)], noise=[numbers.randbytes(1500).hex() for _ in range(100)])
    run = ("run", str(path), "--target", TARGET, "--name", "noisy", "--max-tokens", "2")
    cli(*run)
    store = Path(cli.store.removeprefix("sqlite:///"))
    small_disk.leave(40_000)
    attempts = [
        ("export", "noisy", "--out", f"{small_disk.folder}/out.parquet"),
        (*run, "--out", f"{small_disk.folder}/out.parquet"),
        *(
            ("sql", "SELECT carried FROM results", "--format", form, "--out", f"{small_disk.folder}/out.{form}")
            for form in ("csv", "json", "parquet")
        ),
    ]
    for attempt in attempts:
        errors = cli(*attempt, code=1).stderr
        (sentence,) = re.findall(r".*cannot be written.*", errors)
        assert "no space is left" in sentence
        assert "MiB free in" in sentence
        assert "Traceback" not in errors
        assert small_disk.files == [], attempt
    small_disk.leave(2_000_000)
    cli("export", "noisy", "--out", f"{small_disk.folder}/out.parquet")
    assert pq.read_table(small_disk.folder / "out.parquet").num_rows == 100
    assert store.exists()


def test_a_run_on_a_full_disk_waits_stops_at_ctrl_c_and_goes_on(
    cli: Cli, write_prompts: WritePrompts, small_disk: SmallDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """About 400 bytes of text for each row: they do not fit, with what the log of the database takes."""
    path = write_prompts([f"p{n}" for n in range(120)])
    store_url = f"sqlite:///{small_disk.folder}/jobs.db"
    command = [sys.executable, "-c", "from runner.cli import main; main()", "run", str(path)]
    command += ["--target", TARGET_FOR_A_WHILE, "--max-tokens", "400", "--name", "big", "--store", store_url]
    command += ["--set", "lease_seconds=5"]
    Store.open(store_url).dispose()
    small_disk.leave(250_000)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=cli.folder)
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(iter(process.stdout.readline, "")))  # type: ignore[union-attr]
    reader.start()
    try:
        wait_for(lambda: any("no space is left for the store" in line for line in lines), process)
        time.sleep(2)
        process.send_signal(signal.SIGINT)
        assert process.wait(15) == 130, lines
    finally:
        process.kill()
        reader.join()
        process.stdout.close()  # type: ignore[union-attr]
    told = [line for line in lines if "no space is left" in line]
    assert len(told) <= 8, told
    assert str(small_disk.folder) in told[0]
    assert not any("Traceback" in line for line in lines)
    bounded_patience(path, store_url, monkeypatch)
    small_disk.leave(3_000_000)
    assert subprocess.run(command, capture_output=True, timeout=60, check=False, cwd=cli.folder).returncode == 0
    with Store.open(store_url) as store:
        job = store.jobs.get("big")
        assert job.state is JobState.COMPLETED
        assert [result.row_index for result in store.results.iterate(job.id)] == list(range(120))
        assert not store.results.errors(job.id)


def bounded_patience(path: Path, store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "OUTAGE_SECONDS", 1.0)
    with Store.open(store_url, patience=1.0) as store, JsonDisplay() as display:
        run = LocalRun(store, store.jobs.get("big"), threading.Event())
        with pytest.raises(StoreFull, match="free some on the disk that holds"):
            run.run(display)


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, "it ended"
        assert time.monotonic() < deadline
        time.sleep(0.05)
