"""Which of the target's tokens a drafter can draft: those that answers are made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

from workers.training.documents import Document


def frequent_tokens(documents: Iterable[Document], size: int, vocab_size: int) -> torch.Tensor:
    """[size] int64, rising: the tokens that are most frequent in the answers; of equally frequent ones, and where the
    answers have fewer, those with the smallest ids."""
    counts: Counter[int] = Counter()
    for document in documents:
        counts.update(document.answer)
    by_frequency = sorted(range(vocab_size), key=lambda token: (-counts[token], token))
    return torch.tensor(sorted(by_frequency[:size]))


def coverage(documents: Iterable[Document], tokens: torch.Tensor) -> float:
    """Share of the answers' tokens that are among `tokens`."""
    known = set(tokens.tolist())
    answers = [document.answer for document in documents]
    return sum(token in known for answer in answers for token in answer) / max(1, sum(map(len, answers)))
