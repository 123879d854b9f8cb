"""What a training needs to go on as if it had never stopped, in one file that is replaced whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from workers.training.errors import ChangedRun, TrainingError

STATE = "state.pt"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a training is. The order of its documents follows from this and the seed."""

    epoch: int = 0
    pack: int = 0
    """Packs of this epoch that were learned from."""
    step: int = 0
    """Steps of the optimiser."""
    answer_tokens: int = 0
    best: float = 0.0
    """Highest tokens per step that an evaluation gave."""


def save_state(
    folder: Path,
    identity: Mapping[str, Any],
    progress: Progress,
    tensors: Mapping[str, torch.Tensor],
    moments: Mapping[str, Mapping[str, torch.Tensor]],
) -> None:
    """Master weights and moments of the optimiser, by name: by position they would be another's when names change.

    Raises `TrainingError` when the disk is full; the state that was there is kept.
    """
    state = {
        "identity": dict(identity),
        "progress": asdict(progress),
        "tensors": {name: tensor.detach() for name, tensor in tensors.items()},
        "moments": {name: dict(of) for name, of in moments.items()},
    }
    partial = folder / f"{STATE}.partial"
    try:
        torch.save(state, partial)
        partial.replace(folder / STATE)
    except (OSError, RuntimeError) as error:  # torch tells of a full disk by a RuntimeError
        partial.unlink(missing_ok=True)
        reason = str(error).partition("\n")[0]
        raise TrainingError(
            f"the state of step {progress.step} cannot be saved in {folder} ({reason}): is there room on the disk?"
            " What was saved before is kept, and the same command goes on from there"
        ) from error


@dataclass(frozen=True, slots=True)
class State:
    progress: Progress
    tensors: dict[str, torch.Tensor]
    moments: dict[str, dict[str, torch.Tensor]]


def load_state(folder: Path, identity: Mapping[str, Any]) -> State | None:
    """The state in `folder`, if there is one. Raises `ChangedRun`, naming what differs, where it is another run's."""
    file = folder / STATE
    if not file.exists():
        return None
    state = torch.load(file, weights_only=True)
    stored = state["identity"]
    changed = [key for key in sorted({*stored, *identity}) if stored.get(key) != identity.get(key)]
    if changed:
        differences = ", ".join(f"{key} was {stored.get(key)!r} and is {identity.get(key)!r}" for key in changed)
        raise ChangedRun(f"{folder} holds another training: {differences}; resume it as it was, or name another folder")
    return State(Progress(**state["progress"]), state["tensors"], state["moments"])
