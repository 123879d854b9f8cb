from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.cli import Cli
from tests.support.disks import SmallDisk


@pytest.fixture(scope="session", autouse=True)
def warm_kernels(kernels: None) -> None:
    """No test is the one that waits for them."""


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.chdir(tmp_path)
    return Cli(tmp_path)


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
