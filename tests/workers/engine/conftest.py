"""The demo model for tests marked `model`, loaded once in each dtype."""

from __future__ import annotations

import os

import pytest

from workers.engine.api.config import EngineConfig
from workers.engine.api.errors import ModelNotFound
from workers.engine.models.executor import LoadedModel
from workers.engine.models.loading.load import load_model
from workers.engine.models.loading.sources import Source, resolve

ALIAS = "smollm2-135m"


@pytest.fixture(scope="session")
def demo_model() -> Source:
    """SmolLM2-135M-Instruct from its package; skips without it, unless NIGHTDRAFT_REQUIRE_MODEL=1."""
    try:
        return resolve(ALIAS)
    except ModelNotFound as error:
        if os.environ.get("NIGHTDRAFT_REQUIRE_MODEL") == "1":
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def demo_float32(demo_model: Source) -> LoadedModel:
    return load_model(EngineConfig(target=ALIAS, dtype="float32"))


@pytest.fixture(scope="session")
def demo_bfloat16(demo_model: Source) -> LoadedModel:
    return load_model(EngineConfig(target=ALIAS, dtype="bfloat16"))
