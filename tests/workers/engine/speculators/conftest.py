"""Tiny models run fastest on one thread."""

from tests.workers.engine.models.conftest import threads

__all__ = ["threads"]
