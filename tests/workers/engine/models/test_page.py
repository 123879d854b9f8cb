"""docs/models.md says what is so."""

from __future__ import annotations

from pathlib import Path

from tests.support.models.page import table, written


def test_the_table_of_models_is_what_a_run_of_all_of_them_finds(tmp_path: Path) -> None:
    found = table(tmp_path)
    assert len(found.splitlines()) > 40
    assert written() == found, "python -m tests.support.models.page writes the page anew"
