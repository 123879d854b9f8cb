"""Where the cache is: a variable of its own, then what the platform says."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from workers.engine.api.cache_directory import cache_directory


@pytest.mark.skipif(sys.platform != "linux", reason="other platforms have other directories")
@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "home/.cache/nightdraft"),
        ({"XDG_CACHE_HOME": ""}, "home/.cache/nightdraft"),
        ({"XDG_CACHE_HOME": "{root}/xdg"}, "xdg/nightdraft"),
        ({"XDG_CACHE_HOME": "{root}/xdg", "NIGHTDRAFT_CACHE": "{root}/own"}, "own"),
        ({"NIGHTDRAFT_CACHE": "~/own"}, "home/own"),
    ],
)
def test_the_directory_on_linux(
    variables: dict[str, str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("XDG_CACHE_HOME", "NIGHTDRAFT_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(root=tmp_path))
    assert cache_directory() == tmp_path / expected
