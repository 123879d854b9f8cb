"""A kind of drafter, as the trainer sees it."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from workers.training.documents import Document
from workers.training.features import Features


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a drafter made of some documents. Counts are by depth, of the rows at which a token was to be drafted."""

    loss: torch.Tensor
    """Scalar: the sum over rows and depths, each depth with its weight."""
    rows: int
    """Rows of the first depth: `loss / rows` is what compares between packs."""
    right: tuple[torch.Tensor, ...]
    """Per depth [R_d] bool: the drafter's first choice is the token that followed. R_d falls as documents end."""


class Drafter(Protocol):
    """A drafter in training: its weights, its loss, its files."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Layers of the target that it reads, besides the final state."""
        ...

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The weights that are trained, by their names on disk."""
        ...

    def outcome(self, documents: Seq[Document], features: Features) -> Outcome:
        """Pass over packed documents, whose target features these are."""
        ...

    def save(self, folder: Path, about: Mapping[str, Any], dtype: torch.dtype = torch.bfloat16) -> None:
        """Write what the engine loads, weights in `dtype`. `about`: what it was trained for (see `layouts`)."""
        ...
