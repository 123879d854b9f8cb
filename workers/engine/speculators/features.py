"""What drafters that read the target's hidden states need of it."""

from __future__ import annotations

from workers.engine.errors import UnsupportedModel
from workers.engine.speculators.speculator import SpeculatorContext


def require_features(context: SpeculatorContext, method: str) -> None:
    """Raise `UnsupportedModel` when the target's executor does not keep hidden states."""
    if context.cache.shape.hidden_size == 0:
        raise UnsupportedModel(
            f"method {method} reads hidden states, which {type(context.target.executor).__name__} of "
            f"{context.target.name} does not keep"
        )
