"""Files of jobs: who may read them, which may be replaced, and stores that cannot be written or are gone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.support.cli import TARGET, Cli

NIGHTDRAFT = "import sys; from runner.cli import main; sys.argv[0] = 'nightdraft'; main()"


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def prompts(write_prompts: Callable[..., Path]) -> Path:
    return write_prompts(["one", "two", "three"])


def test_what_is_made_is_for_its_owner_alone(cli: Cli, prompts: Path) -> None:
    cli.run(prompts, "--name", "own", "--out", "new/folder")
    cli("sql", "SELECT 1 AS a", "--out", "rows.csv")
    cli("sql", "SELECT 1 AS a", "--out", "rows.parquet")
    assert {mode(cli.folder / name) for name in ("jobs.db", "new/folder/own.parquet", "rows.csv", "rows.parquet")} == {
        0o600
    }
    assert {mode(cli.folder / name) for name in ("new", "new/folder")} == {0o700}
    code = (
        "import sys, glob, os; from storage.store.store import Store\n"
        "with Store.open(sys.argv[1]) as store:\n"
        "    print(*sorted(oct(os.stat(f).st_mode & 0o777) for f in glob.glob(sys.argv[2] + '*')))"
    )
    arguments = [sys.executable, "-c", code, f"sqlite:///{cli.folder}/live.db", f"{cli.folder}/live.db"]
    assert subprocess.check_output(arguments, text=True).split() == ["0o600"] * 3


def test_the_permissions_can_be_widened_and_those_of_others_stay(
    cli: Cli, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cli.folder / "jobs.db").touch(0o666)
    (cli.folder / "jobs.db").chmod(0o606)
    monkeypatch.setenv("NIGHTDRAFT_FILE_MODE", "0660")
    cli.run(prompts, "--name", "own", "--out", "out")
    assert mode(cli.folder / "jobs.db") == 0o606
    assert (mode(cli.folder / "out"), mode(cli.folder / "out" / "own.parquet")) == (0o750, 0o640)
    (cli.folder / "out" / "own.parquet").chmod(0o604)
    cli("export", "own", "-o", "out/own.parquet")
    assert mode(cli.folder / "out" / "own.parquet") == 0o604
    monkeypatch.setenv("NIGHTDRAFT_FILE_MODE", "rw")
    assert "three octal digits" in cli("export", "own", "-o", "x.parquet", code=2).output


def test_the_cache_is_for_its_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from workers.engine.api.cache_directory import make_cache

    monkeypatch.setenv("NIGHTDRAFT_CACHE", str(tmp_path / "a" / "cache"))
    make_cache(tmp_path / "a" / "cache" / "kernels")
    assert (mode(tmp_path / "a" / "cache"), (tmp_path / "a" / "cache" / "kernels").is_dir()) == (0o700, True)


def test_a_file_of_something_else_is_not_replaced(cli: Cli, prompts: Path) -> None:
    cli.run(prompts, "--name", "first", "--out", "out")
    cli.run(prompts, "--name", "other", "--max-tokens", "8")
    file = cli.folder / "out" / "first.parquet"
    shutil.copy(prompts, cli.folder / "mine.parquet")
    (cli.folder / "text.parquet").write_text("precious")
    for arguments, what in (
        (("export", "other", "-o", "out/first.parquet"), "the export of another job"),
        (("export", "other", "-o", "mine.parquet"), "another file"),
        (("export", "other", "-o", "text.parquet"), "another file"),
        (
            ("run", str(prompts), "--target", TARGET, "--max-tokens", "16", "--name", "third", "--out", "mine.parquet"),
            "another file",
        ),
    ):
        shown = cli(*arguments, code=2).output.replace("\n", " ")
        assert f"is {what}, not an export of job" in shown
        assert "--force" in shown
    assert (cli.folder / "text.parquet").read_text() == "precious"
    cli("export", "first", "-o", str(file))
    cli.run(prompts, "--name", "first", "--out", "out")
    cli("export", "other", "-o", "text.parquet", "--force")
    cli.run(prompts, "--name", "third", "--out", "mine.parquet", "--force")
    assert {pq.read_table(cli.folder / name).num_rows for name in ("text.parquet", "mine.parquet")} == {3}
    # An export is the input of another job.
    cli.run(file, "--name", "chained", "--out", "out")
    cli("export", "chained", "-o", "out/chained.parquet")


def test_a_name_of_another_format_is_refused_or_kept_to(cli: Cli, prompts: Path) -> None:
    for out in ("res.csv", "res.JSONL", "dir/res.xlsx"):
        assert "an export is Parquet" in cli("run", str(prompts), "--target", TARGET, "--out", out, code=2).output
    cli.run(prompts, "--name", "own", "--out", "own.pq")
    assert pq.read_table(cli.folder / "own.pq").num_rows == 3
    assert "an export is Parquet" in cli("export", "own", "-o", "x.csv", code=2).output
    query = "SELECT row_index FROM results ORDER BY row_index"
    cli("sql", query, "--out", "rows.csv")
    cli("sql", query, "--out", "rows.json")
    cli("sql", query, "--out", "rows.parquet")
    assert (cli.folder / "rows.csv").read_text().split() == ["row_index", "0", "1", "2"]
    assert (cli.folder / "rows.json").read_text().startswith("[")
    assert pq.read_table(cli.folder / "rows.parquet")["row_index"].to_pylist() == [0, 1, 2]
    wrong = cli("sql", query, "--format", "json", "--out", "rows.csv", code=2).output
    assert "names a csv file, and --format says json" in wrong


def test_a_store_on_a_read_only_medium_can_be_looked_at(cli: Cli, prompts: Path, tmp_path: Path) -> None:
    cli.run(prompts, "--name", "own")
    medium = tmp_path / "medium"
    medium.mkdir()
    shutil.copy(cli.folder / "jobs.db", medium / "jobs.db")
    (medium / "jobs.db").chmod(0o444)
    medium.chmod(0o555)
    environment = {**os.environ, "NIGHTDRAFT_STORE": f"sqlite:///{medium / 'jobs.db'}"}
    # Permissions say nothing to root, unless it gives its capabilities away.
    bounded = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []
    if bounded and shutil.which("setpriv") is None:
        pytest.skip("run as root, and there is no setpriv to give root's capabilities away")

    def look(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*bounded, sys.executable, "-c", NIGHTDRAFT, *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)

    try:
        for arguments, shown in (
            (("status",), "own"),
            (("status", "own"), "3 of 3"),
            (("sql", "SELECT count(*) AS n FROM results"), "3"),
            (("export", "own", "-o", "own.parquet"), "3 rows"),
        ):
            done = look(*arguments)
            assert (done.returncode, done.stderr) == (0, ""), done
            assert shown in done.stdout
        refused = look("run", str(prompts), "--target", TARGET, "--name", "more")
        assert refused.returncode == 1
        assert "cannot be written: the file or its directory is read-only here" in refused.stderr
        assert [file.name for file in medium.iterdir()] == ["jobs.db"]
    finally:
        medium.chmod(0o755)
