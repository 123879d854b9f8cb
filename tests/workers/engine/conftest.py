"""How many threads a test has, and the demo model for tests marked `model`, loaded once in each dtype."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.support.models.demo import ALIAS
from workers.engine.api.config import EngineConfig
from workers.engine.api.errors import ModelNotFound
from workers.engine.models.executor import LoadedModel
from workers.engine.models.loading.load import load_model
from workers.engine.models.loading.sources import Source, resolve


@pytest.fixture(scope="session", autouse=True)
def warm_kernels(kernels: None) -> None:
    """No test is the one that waits for them."""


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """One thread is fastest for tiny models."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> None:
    """Tests that say so (indirectly) get another number."""
    torch.set_num_threads(getattr(request, "param", 1))


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
