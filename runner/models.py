"""Whether the models that a spec names are there: asked before a job is recorded, without loading them."""

from __future__ import annotations

from runner.spec import JobSpec
from workers.engine.config import EngineConfig
from workers.engine.models.sources import resolve

SCRIPTED = "scripted:"
SHARED_DRAFT = "target"


def require_models(spec: JobSpec) -> None:
    """Find the target and the draft. Raises `ModelNotFound`, naming what was tried, and `InvalidConfig`."""
    config = spec.engine_config()
    for name in _names(config):
        if name.startswith(SCRIPTED):
            from workers.engine.models.scripted import Script

            Script.parse(name)
        else:
            resolve(name)


def _names(config: EngineConfig) -> list[str]:
    """The language models among what the engine loads (heads and draft layers have formats of their own)."""
    draft = config.speculation.draft
    if draft is None or draft == SHARED_DRAFT or "draft_model" not in config.speculation.methods:
        return [config.target]
    return [config.target, draft]
