"""Whatever goes wrong inside a model's own code while it is described, probed or loaded is one refusal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from workers.engine.api.errors import EngineError, UnsupportedModel

LONGEST_REASON = 400


@contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turn what is raised inside into `UnsupportedModel`, which says `what` (model, file or part) and the reason.

    Errors of ours pass, and so does a lack of memory, which says nothing of the model.
    """
    try:
        yield
    except (EngineError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UnsupportedModel(f"{what}: {reason(error)}") from error


def reason(error: Exception) -> str:
    """An error in one line: what it says, after its kind where that is not plain from the text."""
    text = " ".join(str(error).split())
    if len(text) > LONGEST_REASON:
        text = f"{text[:LONGEST_REASON]}..."
    return text if isinstance(error, (OSError, ValueError)) and text else f"{type(error).__name__}: {text}"
