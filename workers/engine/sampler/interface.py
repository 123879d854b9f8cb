"""The sampler backend interface and its registry: the work on whole rows of logits, done where these lie."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from workers.engine.api.errors import UnsupportedModel
from workers.engine.sampler.context import RowContext
from workers.engine.state.drawn import Drawn

Ids = npt.NDArray[np.int64]

Settings = tuple[int, int, float, int, float, float, int]
"""Of a row: key and position of its noise, top_p, top_k (0: off), min_p, temperature (> 0), noise (0: none)."""
PLAIN: Settings = (0, 0, 1.0, 0, 0.0, 1.0, 0)
"""The model's own distribution, without noise."""
DTYPES = (torch.bfloat16, torch.float32, torch.float64)
"""Of logits that backends read."""

_COLDEST = float(np.finfo(np.float32).tiny)


class SamplerBackend(Protocol):
    """Reads rows `at` [R] of `logits` [>= R, V], each contiguous and of one of DTYPES. Results lie on the host.

    A row's result depends on that row and its settings alone, bit for bit. Equal scores go to the lowest id.
    """

    def prepare(self, dtype: torch.dtype) -> None:
        """Do now what would else be done when logits of this type are first read."""
        ...

    def argmax(self, logits: torch.Tensor, at: Ids) -> Ids:
        """[R] ids of the largest logits, or MASKED or INVALID."""
        ...

    def draw(self, logits: torch.Tensor, at: Ids, settings: list[Settings], k: int, *, masses: bool = False) -> Drawn:
        """The best k >= 1 of each row by its settings; log_masses only if asked for.

        The result for k is a prefix of the result for k + 1.
        """
        ...

    def weigh(
        self, logits: torch.Tensor, at: Ids, settings: list[Settings]
    ) -> tuple[torch.Tensor, npt.NDArray[np.float64]]:
        """What `draw` draws from: weights e^((logit - maximum) / temperature) of the tokens that pass the filters, 0
        elsewhere, [R, V] float32; and their sums [R], or MASKED or INVALID where there is nothing to draw from."""
        ...


BACKENDS = {
    "cpu": "workers.engine.sampler.cpu:CompiledSampler",
    "cuda": "workers.engine.sampler.copying:CopyingSampler",
}
"""By the type of the device that the logits lie on."""


def require_sampler(device: torch.device) -> None:
    """Raise `UnsupportedModel` for a device whose logits nothing samples from."""
    if device.type not in BACKENDS:
        raise UnsupportedModel(f"no sampler runs on device {device}; there are some for {', '.join(BACKENDS)}")


def sampler_on(device: torch.device) -> SamplerBackend:
    """The backend for logits on a device. Raises what `require_sampler` raises."""
    require_sampler(device)
    return _load(device.type)


@cache
def _load(kind: str) -> SamplerBackend:
    module, _, attribute = BACKENDS[kind].partition(":")
    backend: SamplerBackend = getattr(import_module(module), attribute)()
    return backend


def settings_of(row: RowContext, vocab: int) -> Settings:
    """How a row of `vocab` logits is drawn. At temperature 0 a score is a log-probability: no filters, no noise."""
    params, key, position = row.params, row.seq.key, row.position
    if params.temperature == 0.0:
        return key, position, 1.0, 0, 0.0, 1.0, 0
    top_k = params.top_k if params.top_k < vocab else 0
    return key, position, params.top_p, top_k, params.min_p, max(params.temperature, _COLDEST), 1
