"""What comes of rows of logits, on whatever device they lie."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MASKED, INVALID = -1, -2
"""In place of a token: every logit is -inf; one is NaN or +inf."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """The best k tokens of each of R rows, best first; past the last allowed token MASKED with score -inf."""

    tokens: npt.NDArray[np.int64]
    """[R, k]; INVALID where the row cannot be drawn from."""
    scores: npt.NDArray[np.float32]
    """[R, k] (logit - row maximum) / temperature + noise."""
    log_masses: npt.NDArray[np.float64]
    """[R] log of the kept tokens' sum of e^((logit - maximum) / temperature)."""
