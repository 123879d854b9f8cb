"""What the sampler knows of a row besides its logits."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from workers.engine.api.sampling_params import SamplingParams
from workers.engine.state.sequence import Sequence


@dataclass(frozen=True, slots=True)
class RowContext:
    """One row of logits: those after `seq.tokens` followed by `path`, tokens which are assumed (a drafted path).

    Assumed tokens count like emitted ones, so a row gives the same token before and after its path is committed.
    """

    seq: Sequence
    path: tuple[int, ...] = ()

    @property
    def params(self) -> SamplingParams:
        return self.seq.params

    @property
    def position(self) -> int:
        """Index of the token being sampled, the prompt's included."""
        return len(self.seq.tokens) + len(self.path)

    @property
    def num_emitted(self) -> int:
        return self.seq.num_emitted + len(self.path)

    def counts(self) -> Mapping[int, int]:
        """How often each token was emitted; only for sequences whose parameters need history."""
        if not self.path:
            return self.seq.counts
        counts = dict(self.seq.counts)
        for token in self.path:
            counts[token] = counts.get(token, 0) + 1
        return counts

    def ends_with(self, tokens: tuple[int, ...]) -> bool:
        """Whether these are the last tokens, the prompt's included."""
        committed = len(tokens) - len(self.path)
        if committed <= 0:
            return not tokens or self.path[-len(tokens) :] == tokens
        return tokens[committed:] == self.path and self.seq.tokens[-committed:] == list(tokens[:committed])


def split(rows: Seq[RowContext]) -> tuple[list[int], list[int]]:
    """Indices of the greedy rows, and of those that are drawn at a temperature above 0."""
    cold = [i for i, row in enumerate(rows) if row.params.temperature == 0.0]
    warm = [i for i, row in enumerate(rows) if row.params.temperature != 0.0]
    return cold, warm
