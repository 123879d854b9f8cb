"""`submit --wait`, `scheduler` and `worker` as separate processes on a real broker."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.support.cli import TARGET, Cli

pytestmark = pytest.mark.service
MAIN = "import os; os.geteuid = lambda: 0; from runner.cli import main; main()"
"""As if by root: it is, in most containers."""


@contextmanager
def service(cli: Cli, broker: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A command that serves until SIGTERM; it must then end with 0."""
    environment = {**os.environ, "NIGHTDRAFT_STORE": cli.store, "NIGHTDRAFT_BROKER": broker}
    with (cli.folder / f"{arguments[0]}.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", MAIN, *arguments], env=environment, stderr=log, stdout=log, text=True
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=30)
            finally:
                process.kill()
    assert process.returncode == 0, (cli.folder / f"{arguments[0]}.log").read_text()


def wait_for_log(cli: Cli, process: subprocess.Popen[str], name: str, text: str) -> None:
    deadline = time.monotonic() + 60
    while text not in (cli.folder / f"{name}.log").read_text():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_submitted_job_is_served_to_its_end(cli: Cli, write_prompts: Callable[..., Path], redis_url: str) -> None:
    write_prompts([f"p{n}" for n in range(30)])
    (cli.folder / "job.yaml").write_text(
        f"name: served\ninput: {{paths: prompts.parquet}}\nengine: {{target: '{TARGET}'}}\n"
        "sampling: {max_tokens: 6}\nchunk_rows: 7\n"
    )
    with ExitStack() as services:
        wait_for_log(cli, services.enter_context(service(cli, redis_url, "scheduler")), "scheduler", "serving")
        services.enter_context(service(cli, redis_url, "worker", "--concurrency", "2"))
        cli("submit", "job.yaml", "--wait")
        (worker,) = [c for c in cli.json("doctor", "--broker", redis_url) if c["check"] == "workers"]
        assert worker["level"] == "ok"
    summary = cli.json("status", "served")
    assert (summary["state"], summary["num_ok"], summary["num_errors"]) == ("completed", 30, 0)
    logs = {name: (cli.folder / f"{name}.log").read_text() for name in ("scheduler", "worker")}
    assert "setting the store up" in logs["scheduler"]
    for text in logs.values():
        assert not re.search("alembic|Warning|superuser", text)


def test_workers_run_no_code_that_comes_with_a_model_unless_told_to(
    cli: Cli, write_prompts: Callable[..., Path], redis_url: str
) -> None:
    write_prompts(["p"])
    (cli.folder / "job.yaml").write_text(
        f"name: codeful\ninput: {{paths: prompts.parquet}}\nengine: {{target: '{TARGET}', trust_remote_code: true}}\n"
    )
    assert "warning: engine.trust_remote_code" in cli("submit", "job.yaml").stderr
    with service(cli, redis_url, "scheduler"):
        with service(cli, redis_url, "worker") as vetoing:
            wait_for_log(cli, vetoing, "worker", "--allow-remote-code")
            assert cli.json("status", "codeful")["error_code"] == "remote_code_refused"
        cli("resume", "codeful")
        with service(cli, redis_url, "worker", "--allow-remote-code"):
            cli("submit", "job.yaml", "--wait")
    assert cli.json("status", "codeful")["num_ok"] == 1


def test_a_worker_that_is_through_ends_whatever_its_threads_do(tmp_path: Path) -> None:
    code = """
import sys, threading, workers.queue.app
def serve(*arguments, **options):
    threading.Thread(target=threading.Event().wait).start()
    print("through", end="")
    return 0
workers.queue.app.run_worker = serve
sys.argv = ["nightdraft", "worker"]
from runner.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "through"), done.stderr


def test_doctor_finds_the_broker_and_misses_the_workers(cli: Cli, redis_url: str) -> None:
    checks = {check["check"]: check for check in cli.json("doctor", "--broker", redis_url)}
    assert checks["broker"]["level"] == "ok"
    assert checks["workers"]["level"] == "warning"


@pytest.mark.parametrize("service", ["worker", "scheduler"])
@pytest.mark.parametrize(
    ("store", "broker", "text"),
    [
        ("postgresql://u@nohost.invalid/db", "{redis}", "cannot open the store postgresql.*failed to resolve host"),
        ("{store}", "redis://nohost.invalid/0", "broker redis://nohost.invalid/0: .*Name or service not known"),
        ("{store}", "redis://nobody:wrong@{redis_server}", "broker redis://nobody:.*@.*: AuthenticationError"),
        ("{store}", "amqp://guest:wrong@127.0.0.1:5672//", "broker amqp://guest:.*@.*: AccessRefused"),
    ],
)
def test_a_service_whose_urls_are_wrong_ends_at_once(
    cli: Cli, redis_url: str, rabbitmq_url: str, service: str, store: str, broker: str, text: str
) -> None:
    names = {"store": cli.store, "redis": redis_url, "redis_server": redis_url.removeprefix("redis://")}
    result = cli(service, "--store", store.format(**names), "--broker", broker.format(**names), code=2)
    assert re.search(text, result.stderr), result.stderr
    assert "wrong" not in result.stderr
    assert "Traceback" not in result.stderr
