"""Engines with a tiny target and drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.drafts.weights import random_heads, tiny_target, write_heads
from workers.engine import EngineConfig, EngineCore, SpeculationConfig


def medusa_core(heads: int, directory: Path, **options: Any) -> EngineCore:
    draft = write_heads(directory, random_heads(heads))
    speculation = SpeculationConfig(method="medusa", draft=draft, policy="fixed", **options)
    return EngineCore(EngineConfig("tiny", speculation=speculation, kv_blocks=60), model=tiny_target())
