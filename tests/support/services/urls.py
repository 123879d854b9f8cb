"""Where the services of the tests are, and what happens where one is missing."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest

POSTGRES = os.environ.get("NIGHTDRAFT_TEST_POSTGRES", "postgresql://postgres@127.0.0.1:5432/test")
REDIS = os.environ.get("NIGHTDRAFT_TEST_REDIS", "redis://127.0.0.1:6379")
RABBITMQ = os.environ.get("NIGHTDRAFT_TEST_RABBITMQ", "amqp://guest:guest@127.0.0.1:5672//")
REQUIRED = os.environ.get("NIGHTDRAFT_REQUIRE_SERVICES") == "1"


def missing(reason: str) -> NoReturn:
    """Skip the test, or fail it where every service has to be there."""
    if REQUIRED:
        pytest.fail(f"{reason} (and NIGHTDRAFT_REQUIRE_SERVICES=1)")
    pytest.skip(reason)
