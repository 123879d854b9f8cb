"""The registry of engines: a job names one, and an unknown name is refused before anything loads."""

from __future__ import annotations

import pytest

from workers.engine import Engine
from workers.engine.api.backends import ENGINES
from workers.engine.api.config import EngineConfig
from workers.engine.api.errors import InvalidConfig
from workers.hosting.interface import real_engine


def test_a_job_gets_the_engine_that_it_names() -> None:
    assert isinstance(real_engine(EngineConfig("scripted:")), Engine)


def test_an_unknown_engine_is_refused_and_the_known_ones_named() -> None:
    with pytest.raises(InvalidConfig, match="backend must be one of nightdraft; got 'nightdarft'"):
        EngineConfig("scripted:", backend="nightdarft")


def test_another_engine_is_another_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, "own", f"{__name__}:Own")
    config = EngineConfig("scripted:")
    object.__setattr__(config, "backend", "own")
    assert isinstance(real_engine(config), Own)


class Own:
    def __init__(self, config: EngineConfig) -> None:
        self.config = config
