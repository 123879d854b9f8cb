"""A backend for devices without kernels of their own: rows are copied to the CPU, but for greedy ones."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from workers.engine.sampler.cpu import CompiledSampler
from workers.engine.sampler.interface import Ids, Settings
from workers.engine.state.drawn import INVALID, MASKED, Drawn


class CopyingSampler:
    """`SamplerBackend` for any device that torch knows."""

    def __init__(self) -> None:
        self._cpu = CompiledSampler()

    def prepare(self, dtype: torch.dtype) -> None:
        self._cpu.prepare(dtype)

    def argmax(self, logits: torch.Tensor, at: Ids) -> Ids:
        best, tokens = logits[at].max(dim=-1)
        tokens[best == -torch.inf] = MASKED
        tokens[~(best < torch.inf)] = INVALID
        return tokens.cpu().numpy()

    def draw(self, logits: torch.Tensor, at: Ids, settings: list[Settings], k: int, *, masses: bool = False) -> Drawn:
        return self._cpu.draw(logits[at].cpu(), np.arange(len(at)), settings, k, masses=masses)

    def weigh(
        self, logits: torch.Tensor, at: Ids, settings: list[Settings]
    ) -> tuple[torch.Tensor, npt.NDArray[np.float64]]:
        return self._cpu.weigh(logits[at].cpu(), np.arange(len(at)), settings)
