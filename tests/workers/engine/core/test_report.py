"""The engine's report says what ran, also where a file decided it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.drafts.cores import medusa_core
from workers.engine import EngineConfig, EngineCore, SpeculationConfig
from workers.engine.measure.preflight import Preflight
from workers.engine.models.executor import LoadedModel
from workers.engine.models.loading.load import load_model
from workers.engine.speculators.medusa.tree import calibrate_tree, write_tree
from workers.engine.speculators.self.skip_file import SkipFile

TARGET = "scripted:layers=4"
SKIP = ["attn.1", "mlp.3"]


@pytest.fixture
def target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    """With a skip set calibrated for it, here and in skip.json."""
    monkeypatch.setenv("NIGHTDRAFT_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    model = load_model(EngineConfig(TARGET))
    for path in (None, "skip.json"):
        SkipFile(TARGET, model.content_hash, tuple(SKIP), 0.9, 0.6, 3, 1.2).write(path)
    return model


@pytest.mark.parametrize(
    ("options", "skip"),
    [
        ({"method": "self"}, SKIP),
        ({"method": "ngram", "row_methods": ("self",)}, SKIP),
        ({"method": "self", "skip_file": "skip.json"}, SKIP),
        ({"method": "self", "skip": ("mlp.0",)}, ["mlp.0"]),
        ({"method": "self", "exit_layer": 3}, ["attn.3", "mlp.3"]),
    ],
    ids=str,
)
def test_it_names_the_sublayers_that_are_skipped(target: LoadedModel, options: dict[str, Any], skip: list[str]) -> None:
    config = EngineConfig(TARGET, speculation=SpeculationConfig(**options))
    assert EngineCore(config).report()["speculator"]["skip"] == skip
    settled = Preflight(config).config
    assert EngineCore(settled).report()["speculator"]["skip"] == skip
    assert settled.speculation.skip_file is None
    assert settled.speculation.skip is not None or settled.speculation.exit_layer == 3


def test_it_shows_medusas_tree(tmp_path: Path) -> None:
    trees = {}
    for name, ranks in {"one": [(0, 0), (1,)], "same": [(1,), (0, 0)], "other": [(0, 1), (1,)]}.items():
        directory = tmp_path / name
        directory.mkdir()
        write_tree(directory, calibrate_tree([ranks], 9))
        trees[name] = medusa_core(2, directory).report()["speculator"]["tree"]
    assert trees["one"]["num_paths"] == 3
    assert trees["one"]["paths"] == [[0], [0, 0], [1]]
    assert trees["one"] == trees["same"]
    assert trees["one"]["content_hash"] != trees["other"]["content_hash"]
    assert medusa_core(2, tmp_path, tree_width=3, tree_nodes=5).report()["speculator"]["tree"] == {
        "width": 3, "nodes": 5,
    }  # fmt: skip
