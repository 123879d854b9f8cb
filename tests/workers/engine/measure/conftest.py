"""A small Llama, and a machine on which nothing was calibrated."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.models.tiny import config_of, save


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("llama"), config_of("Llama", num_hidden_layers=8))


@pytest.fixture
def nothing_calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIGHTDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
