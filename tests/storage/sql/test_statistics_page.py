"""The SQL on docs/statistics.md: runs, finds something, and says the same on both databases and through psql."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from storage.store.query import run_sql
from storage.store.store import Store
from tests.support.records import add_job, work

PAGE = Path(__file__).parents[3] / "docs" / "statistics.md"
BLOCKS = re.findall(r"```sql\n(.*?)```", PAGE.read_text(), re.DOTALL)


def filled(store: Store) -> Store:
    work(store, add_job(store, "nightly", num_rows=20, num_samples=2), bad_rows=(4, 9))
    work(store, add_job(store, "other", num_rows=3))
    return store


def answers(store: Store) -> list[list[tuple[Any, ...]]]:
    return [list(run_sql(store, block)[1]) for block in BLOCKS]


def test_every_block_finds_something(store: Store) -> None:
    assert len(BLOCKS) >= 8
    for block, rows in zip(BLOCKS, answers(filled(store)), strict=True):
        assert rows, block


@pytest.mark.service
def test_both_databases_say_the_same(tmp_path: Path, postgres_url: str) -> None:
    with Store.open(f"sqlite:///{tmp_path / 'store.db'}") as one, Store.open(postgres_url) as other:
        for block, first, second in zip(BLOCKS, answers(filled(one)), answers(filled(other)), strict=True):
            if "elapsed_seconds" in block:
                first, second = ([row[:3] for row in rows] for rows in (first, second))
            assert first == second, block


@pytest.mark.service
def test_psql_says_the_same(postgres_url: str) -> None:
    psql = shutil.which("psql")
    if psql is None:
        pytest.skip("psql is not installed")
    with Store.open(postgres_url) as store:
        wanted = answers(filled(store))
    for block, rows in zip(BLOCKS, wanted, strict=True):
        command = [psql, postgres_url, "--no-psqlrc", "--csv", "--tuples-only", "--pset=null=", "-c", block]
        output = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "PGTZ": "UTC"})
        assert output.stdout.splitlines() == [",".join(map(_as_psql, row)) for row in rows]


def _as_psql(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "t" if value else "f"
    return f"{value:g}" if isinstance(value, float) and value.is_integer() else str(value)
