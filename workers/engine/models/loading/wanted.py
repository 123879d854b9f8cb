"""What is asked of a loader."""

from __future__ import annotations

from dataclasses import dataclass

from workers.engine.api.config import EngineConfig
from workers.engine.models.layers.precision import Weights


@dataclass(frozen=True, slots=True)
class Wanted:
    """A model, how much context it must have, and how its weights are kept."""

    name: str
    """Directory, hub id, alias or GGUF file."""
    config: EngineConfig
    """Of its options those that are not the target's alone: dtype, device, attention, trust_remote_code."""
    max_model_len: int | None = None
    """Tokens that a sequence must be allowed to have; None: as many as the model can."""
    bound: int | None = None
    """Tokens beyond which nothing is gained, since another model is limited to them."""
    weights: Weights = Weights.WHOLE
