"""What both sides of the engine's interface speak loads no library that takes seconds; nor do rows load a kernel."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import workers.engine.api

API = [f"workers.engine.api.{path.stem}" for path in Path(workers.engine.api.__file__).parent.glob("[a-z]*.py")]
HEAVY = ("torch", "numba", "transformers")
STATE = ("state.rows", "state.batch", "state.drawn", "attention.interface", "sampler.interface")


@pytest.mark.parametrize(
    ("modules", "unwanted"),
    [
        (["workers.engine", "workers.hosting.interface", *API], HEAVY),
        ([f"workers.engine.{name}" for name in STATE], ("numba", "transformers")),
    ],
    ids=["interface", "state"],
)
def test_heavy_libraries_are_not_loaded(modules: list[str], unwanted: tuple[str, ...]) -> None:
    code = f"import sys, {', '.join(modules)}; print([name for name in {unwanted} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"
