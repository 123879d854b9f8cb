"""The rows of a call, sorted by what has to be done to their logits before the kernels read them."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from workers.engine.kernels.cpu import sampling, weights
from workers.engine.kernels.cpu.sampling import INVALID, MASKED, ROW, Drawn
from workers.engine.sampler.context import RowContext
from workers.engine.sampler.edits import edit, is_edited

Ids = npt.NDArray[np.int64]

_COLDEST = float(np.finfo(np.float32).tiny)
_DTYPES = (torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of a call, `index` saying which; row i of the part is row `at[i]` of `logits`."""

    logits: torch.Tensor  # [>= n, V], each row contiguous
    at: Ids
    index: Ids
    rows: Seq[RowContext]

    def argmax(self, chosen: list[int]) -> Ids:
        """The largest logit of the rows `chosen` of this part: ids, or MASKED or INVALID."""
        if self.logits.device.type == "cpu":
            return sampling.argmax(self.logits.dtype, self.logits.shape[1], _addresses(self.logits, self.at[chosen]))
        best, tokens = self.logits[self.at[chosen]].max(dim=-1)
        tokens[best == -torch.inf] = MASKED
        tokens[~(best < torch.inf)] = INVALID
        return tokens.cpu().numpy()

    def draw(self, chosen: Seq[int], k: int, *, masses: bool = False) -> Drawn:
        """The best k of the rows `chosen` of this part, each with its own temperature, filters and noise."""
        logits, table = self._table(chosen)
        return sampling.draw(logits.dtype, logits.shape[1], table, k, masses=masses)

    def weigh(self, chosen: Seq[int]) -> tuple[torch.Tensor, npt.NDArray[np.float64]]:
        """What `draw` draws from: weights [n, V] float32, and their sums [n] or MASKED or INVALID."""
        logits, table = self._table(chosen)
        return weights.weigh(logits.dtype, logits.shape[1], table)

    def _table(self, chosen: Seq[int]) -> tuple[torch.Tensor, npt.NDArray[np.void]]:
        """Logits on the CPU and the settings of the rows `chosen`, for kernels; these point into those."""
        logits, at = on_host(self.logits, self.at[chosen])
        addresses = _addresses(logits, at).tolist()
        rows = zip(chosen, addresses, strict=True)
        return logits, np.array([_settings(self.rows[i], address, logits.shape[1]) for i, address in rows], ROW)


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
    with np.errstate(all="ignore"):  # what overflows shows as an infinite logit, which the kernels report
        for values, context in zip(copy.numpy(), contexts, strict=True):
            edit(values, context)
    yield Part(copy, np.arange(len(edited)), np.array(edited), contexts)


def draw_plain(logits: torch.Tensor, at: Ids, k: int) -> Drawn:
    """The best k of the rows `at` of CPU logits at temperature 1, without filters or noise."""
    table = [(address, 0, 0, 1.0, 0, 0.0, 1.0, 0) for address in _addresses(logits, at).tolist()]
    return sampling.draw(logits.dtype, logits.shape[1], np.array(table, ROW), k, masses=True)


def readable(logits: torch.Tensor, rows: Seq[RowContext]) -> torch.Tensor:
    """The same logits with a dtype and layout that the kernels read."""
    if logits.ndim != 2 or len(logits) != len(rows):
        raise ValueError(f"logits of shape {tuple(logits.shape)} do not fit {len(rows)} rows")
    if logits.dtype not in _DTYPES:
        logits = logits.float()
    return logits if logits.stride(1) == 1 else logits.contiguous()


def on_host(logits: torch.Tensor, at: Ids) -> tuple[torch.Tensor, Ids]:
    """The rows `at` of `logits` on the CPU: where they lie, if they are there already."""
    if logits.device.type == "cpu":
        return logits, at
    return logits[at].cpu(), np.arange(len(at))


def _settings(row: RowContext, address: int, vocab: int) -> tuple[int, int, int, float, int, float, float, int]:
    """The fields of ROW. At temperature 0 a score is a log-probability: no filters, no noise."""
    params, key, position = row.params, row.seq.key, row.position
    if params.temperature == 0.0:
        return address, key, position, 1.0, 0, 0.0, 1.0, 0
    top_k = params.top_k if params.top_k < vocab else 0
    return address, key, position, params.top_p, top_k, params.min_p, max(params.temperature, _COLDEST), 1


def _addresses(logits: torch.Tensor, at: Ids) -> Ids:
    return logits.data_ptr() + at * (logits.stride(0) * logits.element_size())
