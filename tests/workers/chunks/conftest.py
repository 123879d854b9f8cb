"""Fixtures of the tests of chunks."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads for what must run beside the test."""
    with ThreadPoolExecutor() as pool:
        yield pool
