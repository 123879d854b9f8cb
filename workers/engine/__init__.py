"""The engine: continuous-batched speculative decoding. Usable alone from Python; see docs/engine.md.

Importing this package loads no torch: the heavy names are resolved on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from workers.engine.api.config import EngineConfig, SpeculationConfig
from workers.engine.api.errors import EngineError
from workers.engine.api.request import Completion, FinishReason, Request, Timings, TokenLogprob
from workers.engine.api.sampling_params import SamplingParams
from workers.engine.api.stats import AcceptanceStats

if TYPE_CHECKING:
    from workers.engine.async_engine import Engine
    from workers.engine.core import EngineCore

_LAZY = {"Engine": "workers.engine.async_engine", "EngineCore": "workers.engine.core"}

__all__ = [
    "AcceptanceStats",
    "Completion",
    "Engine",
    "EngineConfig",
    "EngineCore",
    "EngineError",
    "FinishReason",
    "Request",
    "SamplingParams",
    "SpeculationConfig",
    "Timings",
    "TokenLogprob",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
