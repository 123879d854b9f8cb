"""The compiled CPU kernels as a backend: they read rows by their addresses, in place."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from workers.engine.kernels.cpu import sampling, weights
from workers.engine.kernels.cpu.sampling import ROW
from workers.engine.sampler.interface import Ids, Settings
from workers.engine.state.drawn import Drawn


class CompiledSampler:
    """`SamplerBackend` for logits on the CPU."""

    def prepare(self, dtype: torch.dtype) -> None:
        sampling.compile_kernels(dtype)

    def argmax(self, logits: torch.Tensor, at: Ids) -> Ids:
        return sampling.argmax(logits.dtype, logits.shape[1], _addresses(logits, at))

    def draw(self, logits: torch.Tensor, at: Ids, settings: list[Settings], k: int, *, masses: bool = False) -> Drawn:
        return sampling.draw(logits.dtype, logits.shape[1], _table(logits, at, settings), k, masses=masses)

    def weigh(
        self, logits: torch.Tensor, at: Ids, settings: list[Settings]
    ) -> tuple[torch.Tensor, npt.NDArray[np.float64]]:
        return weights.weigh(logits.dtype, logits.shape[1], _table(logits, at, settings))


def _table(logits: torch.Tensor, at: Ids, settings: list[Settings]) -> npt.NDArray[np.void]:
    """What the kernels read: it points into `logits`, which must outlive the call."""
    addresses = _addresses(logits, at).tolist()
    return np.array([(address, *row) for address, row in zip(addresses, settings, strict=True)], ROW)


def _addresses(logits: torch.Tensor, at: Ids) -> Ids:
    return logits.data_ptr() + at * (logits.stride(0) * logits.element_size())
