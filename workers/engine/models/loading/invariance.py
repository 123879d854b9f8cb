"""Does a row's value depend on its company? Measured at load, on the model as it runs."""

from __future__ import annotations

import torch

from workers.engine.models.executor import Executor
from workers.engine.models.trial import Trial
from workers.engine.state.batch import Feed
from workers.engine.state.tree import DraftTree

PROMPT = 9
COMPANY = (1, 2, 5, 24, 70)
"""Lengths of the other sequences: kernels part ways at few rows and many, at odd numbers and even ones."""


def self_test(executor: Executor) -> tuple[str, ...]:
    """Run one short sequence in several ways and compare its logits bit for bit.

    Returns the names of what differs, of "company" (alone and among others), "chunks" (whole and in two passes) and
    "tree" (as tokens and as a path of a draft tree); empty where a row's bits do not depend on the batch.
    """
    trial = Trial(executor)
    vocab = executor.facts.vocab_size
    tokens = [(i + 1) * 7919 % vocab for i in range(PROMPT)]
    alone = trial.chain(tokens)
    equal = {
        "company": all(torch.equal(alone, _among(trial, tokens, length)) for length in COMPANY),
        "chunks": torch.equal(alone[-1:], _chunked(trial, tokens)),
        "tree": torch.equal(alone[-2:], _in_tree(trial, tokens)),
    }
    return tuple(name for name, same in equal.items() if not same)


def _among(trial: Trial, tokens: list[int], length: int) -> torch.Tensor:
    seq = trial.open(tokens[:1], room=len(tokens))
    # No longer than the context each: learned positions end there.
    longest = max(PROMPT, trial.executor.facts.max_model_len)
    ids = [(i + 1) * 104729 % trial.executor.facts.vocab_size for i in range(length)]
    others = [trial.open(ids[start : start + longest]) for start in range(0, length, longest)]
    chain = DraftTree.chain(tokens[1:])
    logits = trial.run([*(Feed(other, 0, len(other)) for other in others), Feed(seq, 0, 1, chain)])[-1]
    for opened in (seq, *others):
        trial.cache.free(opened)
    return logits


def _chunked(trial: Trial, tokens: list[int]) -> torch.Tensor:
    seq = trial.open(tokens)
    half = len(tokens) // 2
    trial.run([Feed(seq, 0, half, logits=False)])
    logits = trial.run([Feed(seq, half, len(tokens))])[0]
    trial.cache.free(seq)
    return logits


def _in_tree(trial: Trial, tokens: list[int]) -> torch.Tensor:
    """Logits of the last two tokens, fed as a path beside a wrong one."""
    seq = trial.open(tokens[:-2], room=4)
    wrong = (tokens[-2] + 1) % trial.executor.facts.vocab_size
    tree = DraftTree((wrong, tokens[-2], tokens[-2], tokens[-1]), (-1, -1, 0, 1))
    logits = trial.run([Feed(seq, 0, len(tokens) - 2, tree)])[0][[2, 4]]
    trial.cache.free(seq)
    return logits
