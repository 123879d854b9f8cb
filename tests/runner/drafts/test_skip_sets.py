"""Method self skips one set for the whole job: settled when it is submitted, on record, the same on every worker."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.jobs.local import LocalRun
from runner.output.progress import JsonDisplay
from storage.records import JobState
from storage.store.store import Store
from tests.support.cli import Cli
from workers.engine.api.config import EngineConfig
from workers.engine.models.loading.load import load_model
from workers.engine.speculators.self.skip_file import SkipFile

WritePrompts = Callable[..., Path]
Write = Callable[..., Path]
TARGET = "scripted:layers=4,eos_every=8"
SET, OTHER = ("attn.1", "mlp.2"), ("mlp.3",)
SELF = ("--method", "self", "--name", "j")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIGHTDRAFT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def prompts(write_prompts: WritePrompts) -> Path:
    return write_prompts([f"prompt {n}" for n in range(6)], speculation=["self", None] * 3)


def calibrated(skip: tuple[str, ...] = SET, path: str | None = None) -> Path:
    """What `nightdraft calibrate` would have written for the target."""
    found = SkipFile(TARGET, load_model(EngineConfig(TARGET)).content_hash, skip, 0.9, 0.5, 3, 1.2)
    return found.write(path)


def speculation_of(cli: Cli) -> dict[str, Any]:
    with Store.open(cli.store) as store:
        section: dict[str, Any] = store.jobs.get("j").spec.engine["speculation"]
    return section


def test_what_was_calibrated_is_in_the_spec_and_on_record(cli: Cli, prompts: Path) -> None:
    calibrated()
    cli.run(prompts, *SELF, target=TARGET)
    assert speculation_of(cli)["skip"] == list(SET)
    with Store.open(cli.store) as store:
        [model], [speculator] = (
            store.telemetry.models(store.jobs.get("j").id),
            store.telemetry.speculators(store.jobs.get("j").id),
        )
    assert model["report"]["speculator"]["skip"] == speculator["parameters"]["skip"] == list(SET)


def test_a_named_file_is_read_when_the_job_is_submitted(cli: Cli, prompts: Path) -> None:
    calibrated(SET, "skip.json")
    calibrated(OTHER)
    cli.run(prompts, *SELF, "--skip-file", "skip.json", target=TARGET)
    assert speculation_of(cli)["skip"] == list(SET)
    assert speculation_of(cli)["skip_file"] is None


def test_so_is_it_for_methods_of_rows_and_in_the_plan(cli: Cli, prompts: Path) -> None:
    calibrated()
    arguments = (prompts, "--method", "ngram", "--row-method", "self", "--name", "j")
    assert cli.run(*arguments, "--dry-run", target=TARGET)["plan"]["skip"] == list(SET)
    cli.run(*arguments, target=TARGET)
    assert speculation_of(cli)["skip"] == list(SET)


@pytest.mark.parametrize("named", [(), ("--skip-file", "skip.json")])
def test_the_same_command_after_a_recalibration_is_refused_by_name(
    cli: Cli, prompts: Path, named: tuple[str, ...]
) -> None:
    path = "skip.json" if named else None
    calibrated(SET, path)
    first = cli.run(prompts, *SELF, *named, target=TARGET)
    calibrated(OTHER, path)
    refused = cli("run", str(prompts), "--target", TARGET, "--max-tokens", "16", *SELF, *named, code=2)
    assert "engine.speculation.skip" in refused.output
    assert "mlp.3" in refused.output
    fresh = cli.run(prompts, *SELF, *named, "--new", target=TARGET)
    assert fresh["id"] != first["id"]


@pytest.mark.parametrize("named", [(), ("--skip-file", "skip.json")])
@pytest.mark.parametrize("complete", [True, False])
def test_resuming_needs_no_file(cli: Cli, prompts: Path, named: tuple[str, ...], complete: bool) -> None:
    file = calibrated(SET, "skip.json" if named else None)
    arguments = ("run", str(prompts), "--target", TARGET, "--max-tokens", "16", *SELF, *named)
    first = cli.json(*arguments)
    if not complete:
        with Store.open(cli.store) as store:
            store.database.write(lambda connection: connection.exec_driver_sql("DELETE FROM results"))
            reopen = "UPDATE chunks SET state = 'pending'", "UPDATE jobs SET state = 'in_progress', finished_at = NULL"
            for statement in reopen:
                store.database.write(lambda connection, sql=statement: connection.exec_driver_sql(sql))
    file.unlink()
    again = cli(*arguments, "--json")
    assert "goes on with the skip set that it was submitted with" in again.stderr
    assert json.loads(again.stdout)["id"] == first["id"]
    with Store.open(cli.store) as store:
        assert len(list(store.results.iterate(first["id"]))) == 6
    cli(*arguments, "--new", code=2)


def test_a_worker_without_the_calibration_skips_the_same(
    cli: Cli, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrated()
    section = f"{{target: '{TARGET}', speculation: {{method: self}}}}"
    (tmp_path / "job.yaml").write_text(f"name: j\ninput: {{paths: {prompts.name}}}\nengine: {section}\n")
    cli("submit", "job.yaml")
    monkeypatch.setenv("NIGHTDRAFT_CACHE", str(tmp_path / "elsewhere"))
    with Store.open(cli.store) as store:
        job = LocalRun(store, store.jobs.get("j"), threading.Event()).run(JsonDisplay()).job
        assert job.state is JobState.COMPLETED
        assert store.telemetry.models(job.id)[0]["report"]["speculator"]["skip"] == list(SET)


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        (TARGET, "method: self", "run `nightdraft calibrate"),
        ("./not-here", "method: self", "set skip or exit_layer"),
        ("./not-here", "method: ngram, row_methods: [self]", "set skip or exit_layer"),
        ("./not-here", "method: self, skip_file: nowhere.json", "No such file"),
        (TARGET, "method: self, skip_file: other.json", "was calibrated for other"),
    ],
)
def test_a_job_for_other_machines_is_refused_where_nothing_says_what_is_skipped(
    cli: Cli, prompts: Path, target: str, options: str, message: str
) -> None:
    SkipFile("other", "f" * 32, SET, 0.9, 0.5, 3, 1.2).write("other.json")
    section = f"{{target: '{target}', speculation: {{{options}}}}}"
    (cli.folder / "job.yaml").write_text(f"input: {{paths: {prompts.name}}}\nengine: {section}\n")
    refused = cli("submit", "job.yaml", code=2)
    assert message in refused.output.replace("\n", " ")
    assert cli.json("status") == []


@pytest.mark.parametrize(
    ("options", "skip"),
    [("skip: [attn.0]", ["attn.0"]), ("exit_layer: 2", None), ("skip_file: skip.json", list(SET))],
)
def test_what_is_given_goes_to_machines_that_have_the_target(
    cli: Cli, prompts: Path, options: str, skip: list[str] | None
) -> None:
    calibrated(SET, "skip.json")
    section = f"{{target: ./not-here, speculation: {{method: self, {options}}}}}"
    (cli.folder / "job.yaml").write_text(f"name: j\ninput: {{paths: {prompts.name}}}\nengine: {section}\n")
    said = cli("submit", "job.yaml").stderr
    assert ("cannot be told here" in said) == ("skip_file" in options)
    assert speculation_of(cli)["skip"] == skip
    assert speculation_of(cli)["skip_file"] is None
