from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import torch
from workers.engine.kernels.cpu.philox import gumbel_rows
print(gumbel_rows([1], [2], 8).shape)
"""


def run(cache: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"NIGHTDRAFT_CACHE": str(cache)}
    return subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)


def test_compiled_kernels_are_kept_and_found_again(tmp_path: Path) -> None:
    run(tmp_path)
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nbc")}
    assert kept
    run(tmp_path)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nbc")} == kept


def test_without_a_cache_it_says_so_and_works(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    done = run(blocked)
    assert "[1, 8]" in done.stdout
    assert "set NIGHTDRAFT_CACHE" in done.stderr
