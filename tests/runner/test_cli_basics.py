"""What needs no job: help, suggestions, exit codes, and how little is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from runner.cli import app
from runner.errors import ExitCode, SpecError, UsageError, exit_code
from scheduler.errors import BrokerUnavailable, InvalidInput
from storage.errors import InvalidStore, StoreUnavailable, UnknownJob
from workers.engine.api.errors import EngineStopped, InvalidConfig, ModelNotFound

COMMANDS = (
    *("run", "submit", "status", "watch", "cancel", "resume", "retry"),
    *("errors", "export", "sql", "worker", "scheduler", "doctor", "db"),
)
runner = CliRunner()


def test_help_names_every_command() -> None:
    result = runner.invoke(app, ["--help"])
    assert result.exit_code == 0
    for command in COMMANDS:
        assert command in result.stdout
        assert runner.invoke(app, [command, "--help"]).exit_code == 0


def test_version() -> None:
    assert runner.invoke(app, ["--version"]).stdout.startswith("nightdraft 0.")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["statsu"], "Did you mean 'status'"),
        (["run", "x.parquet", "--metod", "ngram"], "--method"),
        (["run"], "Missing argument"),
        (["retry", "last"], "nightdraft retry JOB --failed"),
        (["run", "x.parquet"], "no model is named: add --target"),
        (["submit", "x.parquet"], "a job file (.yaml, .yml, .json) is needed, not x.parquet"),
        (["run", "x.parquet", "--target", "m", "--method", "ngarm"], "method must be one of none, ngram"),
        (["run", "x.parquet", "--target", "m", "--set", "engine.max_bacth=3"], "did you mean 'max_batch'"),
        (["status", "nobody"], "nobody"),
        (["sql", "DELETE FROM jobs"], "only queries"),
        (["sql", "SELECT 1", "--format", "cvs"], "did you mean 'csv'"),
        (["sql", "SELECT 1", "--format", "parquet"], "add --out"),
    ],
)
def test_bad_usage_exits_with_2_and_says_what_to_do(arguments: list[str], message: str, tmp_path: Path) -> None:
    environment = {"NIGHTDRAFT_STORE": f"sqlite:///{tmp_path}/s.db", "COLUMNS": "200"}
    runner.invoke(app, ["db", "upgrade"], env=environment)
    result = runner.invoke(app, arguments, env=environment)
    assert result.exit_code == ExitCode.USAGE, result.output
    assert message in result.output


@pytest.mark.parametrize(
    ("store", "message"),
    [
        ("mysql://host/db", "SQLite or PostgreSQL"),
        ("sqlite:////nowhere/at/all/store.db", "/nowhere/at/all"),
        ("notes.txt", "file is not a database"),
        ("mistyped.db", "there is no store sqlite:///mistyped.db yet"),
    ],
)
def test_a_store_that_is_none_is_bad_configuration(
    store: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("not a database, but long enough to have a header" * 10)
    result = runner.invoke(app, ["status", "--store", store], env={"COLUMNS": "200"})
    assert result.exit_code == ExitCode.USAGE, result.output
    assert message in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("x"), 2),
        (SpecError("x"), 2),
        (InvalidInput("x"), 2),
        (UnknownJob("x"), 2),
        (InvalidConfig("x"), 2),
        (ModelNotFound("x"), 2),
        (EngineStopped("x"), 1),
        (BrokerUnavailable("x"), 1),
        (InvalidStore("x"), 2),
        (StoreUnavailable("x"), 1),
        (ValueError("nobody expected this"), None),
    ],
)
def test_exit_codes_of_errors(error: Exception, code: int | None) -> None:
    assert exit_code(error) == code


@pytest.mark.parametrize(
    "arguments", [["--help"], ["status"], ["sql", "SELECT 1"], ["db", "upgrade"], ["run", "--help"]], ids=" ".join
)
def test_no_torch_where_none_is_needed(arguments: list[str], tmp_path: Path) -> None:
    script = (
        "import sys\nfrom runner.cli import app\n"
        "try:\n    app(sys.argv[1:])\nexcept SystemExit as end:\n    assert end.code == 0, end.code\n"
        "assert not {'torch', 'transformers', 'numba'} & set(sys.modules)\n"
    )
    environment = {"NIGHTDRAFT_STORE": f"sqlite:///{tmp_path}/s.db", "PATH": ""}
    runner.invoke(app, ["db", "upgrade"], env=environment)
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
