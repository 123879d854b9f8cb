"""Sampler backends: every one gives the same, and a device without one is refused by its name."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from workers.engine.api.errors import UnsupportedModel
from workers.engine.sampler.copying import CopyingSampler
from workers.engine.sampler.cpu import CompiledSampler
from workers.engine.sampler.interface import DTYPES, PLAIN, Settings, require_sampler, sampler_on

SETTINGS: list[Settings] = [PLAIN, (7, 3, 0.9, 20, 0.0, 0.8, 1), (8, 5, 1.0, 0, 0.05, 1.3, 1), PLAIN, PLAIN]


@pytest.mark.parametrize("dtype", DTYPES)
def test_copying_rows_changes_nothing(dtype: torch.dtype) -> None:
    logits = torch.randn(9, 500, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[4] = -torch.inf
    logits[6, 3] = torch.nan
    at = np.array([8, 1, 0, 4, 6])
    one, other = CompiledSampler(), CopyingSampler()
    assert one.argmax(logits, at).tolist() == other.argmax(logits, at).tolist()
    drawn, again = (backend.draw(logits, at, SETTINGS, 4, masses=True) for backend in (one, other))
    for name in ("tokens", "scores", "log_masses"):
        np.testing.assert_array_equal(getattr(drawn, name), getattr(again, name))
    (weights, masses), (same, sums) = (backend.weigh(logits, at, SETTINGS) for backend in (one, other))
    assert torch.equal(weights, same)
    np.testing.assert_array_equal(masses, sums)


def test_devices_have_a_backend_or_are_refused_by_name() -> None:
    assert isinstance(sampler_on(torch.device("cpu")), CompiledSampler)
    assert isinstance(sampler_on(torch.device("cuda", 1)), CopyingSampler)
    for ask in (require_sampler, sampler_on):
        with pytest.raises(UnsupportedModel, match="no sampler runs on device mps; there are some for cpu, cuda"):
            ask(torch.device("mps"))
