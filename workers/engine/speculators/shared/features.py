"""What drafters that read the target's hidden states need of it."""

from __future__ import annotations

from workers.engine.api.errors import UnsupportedModel
from workers.engine.models.executor import Model


def require_features(target: Model, method: str) -> None:
    """Raise `UnsupportedModel` when the target's executor does not keep hidden states."""
    if target.executor.cache_shape.hidden_size == 0:
        raise UnsupportedModel(
            f"method {method} reads hidden states, which {type(target.executor).__name__} of {target.name} does not "
            "keep"
        )
