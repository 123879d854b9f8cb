"""The demo model for tests marked `model`."""

from __future__ import annotations

import os

import pytest

from workers.engine.api.errors import ModelNotFound
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
