"""Rule "exact": the coupled rule, for any draft whatsoever."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from workers.engine.sampler import RowContext, sample
from workers.engine.state.batch import Feed
from workers.engine.verifier.descent import Verdict, descents_of, emit_all, rows_of


class CoupledVerifier:
    """Sample as plain decoding would, and go on for as long as the draft holds the sample.

    The sampler's noise depends on (key, position, token) alone, so what is emitted is what plain decoding emits,
    whatever was drafted (Daliri, Musco and Suresh 2024, arXiv 2408.07978). All sequences descend one level at a time.
    """

    def verify(self, feeds: Seq[Feed], logits: torch.Tensor, offsets: Seq[int]) -> list[Verdict]:
        descents = descents_of(feeds, offsets)
        active = descents
        while active:
            rows = rows_of(logits, [descent.row for descent in active])
            sampled = sample(rows, [RowContext(descent.seq) for descent in active])
            children = [
                descent.children(descent.node).get(token) for descent, token in zip(active, sampled.tokens, strict=True)
            ]
            active = emit_all(active, sampled.tokens, children, sampled.logprobs)
        return [descent.close() for descent in descents]
