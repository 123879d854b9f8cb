"""The rows of a call, sorted by what has to be done to their logits before a backend reads them."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from workers.engine.sampler.context import RowContext, split
from workers.engine.sampler.edits import edit, is_edited
from workers.engine.sampler.interface import DTYPES, Ids, Settings, sampler_on, settings_of
from workers.engine.state.drawn import Drawn


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of a call, `index` saying which; row i of the part is row `at[i]` of `logits`."""

    logits: torch.Tensor  # [>= n, V], each row contiguous
    at: Ids
    index: Ids
    rows: Seq[RowContext]

    def split(self) -> tuple[list[int], list[int]]:
        """Greedy rows of this part, and those that are drawn."""
        return split(self.rows)

    def argmax(self, chosen: Seq[int]) -> Ids:
        """The largest logit of the rows `chosen` of this part: ids, or MASKED or INVALID."""
        return sampler_on(self.logits.device).argmax(self.logits, self.at[chosen])

    def draw(self, chosen: Seq[int], k: int, *, masses: bool = False) -> Drawn:
        """The best k of the rows `chosen` of this part, each with its own temperature, filters and noise."""
        backend = sampler_on(self.logits.device)
        return backend.draw(self.logits, self.at[chosen], self._settings(chosen), k, masses=masses)

    def weigh(self, chosen: Seq[int]) -> tuple[torch.Tensor, npt.NDArray[np.float64]]:
        """What `draw` draws from: weights [n, V] float32, and their sums [n] or MASKED or INVALID."""
        return sampler_on(self.logits.device).weigh(self.logits, self.at[chosen], self._settings(chosen))

    def _settings(self, chosen: Seq[int]) -> list[Settings]:
        return [settings_of(self.rows[i], self.logits.shape[1]) for i in chosen]


def parts(logits: torch.Tensor, rows: Seq[RowContext]) -> Iterator[Part]:
    """Rows that nothing edits, to be read where they lie, and edited copies of the others, float32 or float64."""
    edited = [i for i, row in enumerate(rows) if is_edited(row)]
    if not edited:
        index = np.arange(len(rows))
        yield Part(logits, index, index, rows)
        return
    index = np.delete(np.arange(len(rows)), edited)
    if len(index):
        yield Part(logits, index, index, [rows[i] for i in index.tolist()])
    copy = logits[edited].to("cpu", torch.float64 if logits.dtype == torch.float64 else torch.float32)
    contexts = [rows[i] for i in edited]
    with np.errstate(all="ignore"):  # what overflows shows as an infinite logit, which backends report
        for values, context in zip(copy.numpy(), contexts, strict=True):
            edit(values, context)
    yield Part(copy, np.arange(len(edited)), np.array(edited), contexts)


def readable(logits: torch.Tensor, rows: Seq[RowContext]) -> torch.Tensor:
    """The same logits with a dtype and layout that backends read."""
    if logits.ndim != 2 or len(logits) != len(rows):
        raise ValueError(f"logits of shape {tuple(logits.shape)} do not fit {len(rows)} rows")
    if logits.dtype not in DTYPES:
        logits = logits.float()
    return logits if logits.stride(1) == 1 else logits.contiguous()
