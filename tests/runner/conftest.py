from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from runner.cli import app

TARGET = "scripted:eos_every=8"


class Cli:
    """Runs `nightdraft` in this process, in a directory and on a store of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = f"sqlite:///{folder / 'jobs.db'}"
        self._runner = CliRunner()

    def __call__(self, *arguments: str, code: int = 0) -> Result:
        """Run a command and check its exit code."""
        result = self._runner.invoke(app, list(arguments), env={"NIGHTDRAFT_STORE": self.store, "COLUMNS": "200"})
        assert result.exit_code == code, (
            f"{arguments}: exit code {result.exit_code}\n{result.output}\n{result.exception!r}"
        )
        return result

    def json(self, *arguments: str, code: int = 0) -> Any:
        """Run a command with --json and read what it prints on stdout."""
        return json.loads(self(*arguments, "--json", code=code).stdout)

    def run(self, path: Path, *arguments: str, target: str = TARGET, code: int = 0) -> Any:
        """`nightdraft run` on the scripted model."""
        return self.json("run", str(path), "--target", target, "--max-tokens", "16", *arguments, code=code)


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.chdir(tmp_path)
    return Cli(tmp_path)


class SmallDisk:
    """A file system of a few megabytes, of which all but a little is taken by a filler."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    def leave(self, free: int) -> None:
        """Grow or shrink the filler so that so many bytes are free."""
        self._filler.unlink(missing_ok=True)
        self._filler.write_bytes(bytes(max(shutil.disk_usage(self.folder).free - free, 0)))

    @property
    def files(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir() if path != self._filler)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no small file system can be mounted here: {mounted.stderr.strip()}")
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def write_prompts(tmp_path: Path) -> Callable[..., Path]:
    """Write prompts (and other columns) to a Parquet file."""

    def write(prompts: Sequence[str | None], name: str = "prompts.parquet", **columns: Sequence[Any]) -> Path:
        path = tmp_path / name
        table = pa.table({"prompt": pa.array(prompts, pa.string()), **{k: list(v) for k, v in columns.items()}})
        pq.write_table(table, path)
        return path

    return write
