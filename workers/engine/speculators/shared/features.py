"""What drafters that read the target's hidden states need of it."""

from __future__ import annotations

from workers.engine.api.errors import UnsupportedModel
from workers.engine.models.executor import Model


def require_features(target: Model, method: str) -> None:
    """Raise `UnsupportedModel` when the target's executor does not keep hidden states."""
    if not target.facts.keeps_hidden:
        raise UnsupportedModel(
            f"method {method} reads hidden states, which {target.facts.executor} of {target.name} does not keep"
        )
