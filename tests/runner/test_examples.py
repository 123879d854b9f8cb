"""The examples run, on the scripted model where a model is needed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).parents[2]
TARGET = "scripted:eos_every=16"


def python(*arguments: str, cwd: Path) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_demo_prompts_are_many_varied_and_distinct(tmp_path: Path) -> None:
    assert "126 prompts" in python(str(ROOT / "examples/make_prompts.py"), "x/prompts.parquet", cwd=tmp_path)
    table = pq.read_table(tmp_path / "x/prompts.parquet")
    assert len(set(table["prompt"].to_pylist())) == len(set(table["id"].to_pylist())) == table.num_rows
    counts = pc.value_counts(table["category"]).to_pylist()
    assert len(counts) >= 6
    assert min(count["counts"] for count in counts) >= 10


def test_the_engine_example_answers_every_question(tmp_path: Path) -> None:
    out = python(str(ROOT / "examples/engine.py"), TARGET, cwd=tmp_path)
    assert out.count("draft tokens accepted") == 5


def test_the_engine_example_of_the_readme_runs(tmp_path: Path) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert "smollm2-135m" in block
    assert "AcceptanceStats(" in python("-c", block.replace("smollm2-135m", TARGET), cwd=tmp_path)


@pytest.mark.model
def test_the_alias_of_the_demo_model_is_found(tmp_path: Path) -> None:
    prompts = tmp_path / "p.parquet"
    python(str(ROOT / "examples/make_prompts.py"), str(prompts), cwd=tmp_path)
    main = "from runner.cli import main; main()"
    out = python("-c", main, "run", str(prompts), "--target", "smollm2-135m", "--dry-run", cwd=tmp_path)
    assert "<|im_start|>user" in out
