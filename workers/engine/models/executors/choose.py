"""Which executor runs a transformers model."""

from __future__ import annotations

from typing import Any

import torch

from workers.engine.models.executors.fused import FusedExecutor, covers
from workers.engine.models.executors.hf import HuggingFaceExecutor


def kind_of(model: Any, device: torch.device | None = None) -> type[FusedExecutor] | type[HuggingFaceExecutor]:
    """The leanest that computes what the model does.

    `device`: where it will run, for a model without weights on the meta device.
    """
    return FusedExecutor if covers(model, device) else HuggingFaceExecutor
