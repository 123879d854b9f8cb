"""The rules against the target's own law, to the last digit, and wrong ones that must not pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
import torch

from tests.support.engine.trees import tree_of
from tests.support.verifier.enumeration import (
    Array,
    Branch,
    Draft,
    Path,
    Toy,
    block_branches,
    chain,
    chains,
    combs,
    law,
    rejection_branches,
)
from workers.engine import SamplingParams
from workers.engine.state.tree import DraftTree
from workers.engine.verifier import BlockVerifier, RejectionVerifier, rejection
from workers.engine.verifier.rules import NONE

RULES = {"rejection": (rejection_branches, RejectionVerifier), "block": (block_branches, BlockVerifier)}


TOYS = [Toy(3, 1, seed) for seed in range(6)]


def off(toy: Toy, drafts: Iterator[Draft], rule: str, branches: Callable[..., Iterator[Branch]] | None = None) -> float:
    """Largest error of a probability."""
    default, make = RULES[rule]
    found = law(toy, drafts, branches or default, make)
    return float(np.abs(found - toy.product(toy.depth + 1)).max())


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("vocab", "length"), [(2, 4), (3, 3), (4, 2), (3, 1)])
def test_sampled_chains(rule: str, vocab: int, length: int) -> None:
    for seed in range(3):
        toy = Toy(vocab, length, seed)
        assert off(toy, chains(toy, length), rule) < 1e-12


@pytest.mark.parametrize("rule", RULES)
def test_ragged_drafts(rule: str) -> None:
    """Drafts of all lengths, drawn and fixed, in one batch: whichever it is, the law is the target's."""
    toy = Toy(3, 3, 5)
    fixed = [DraftTree.chain(path) for path in ((), (0,), (1, 2), (2, 0, 1), (0, 0, 0))]
    sources = [*(list(chains(toy, length)) for length in range(4)), *([(1.0, tree)] for tree in fixed)]
    drafts = [(weight / len(sources), tree) for source in sources for weight, tree in source]
    assert off(toy, iter(drafts), rule) < 1e-12


@pytest.mark.parametrize("params", [{"top_k": 2}, {"top_p": 0.7}, {"temperature": 0.5}, {"temperature": 0.0}])
@pytest.mark.parametrize("rule", RULES)
def test_filtered_targets(rule: str, params: dict[str, float]) -> None:
    toy = Toy(3, 2, 7, SamplingParams(**{"temperature": 1.0, "max_tokens": 50, **params}))
    assert off(toy, chains(toy, 2), rule) < 1e-12


@pytest.mark.parametrize("rule", RULES)
def test_targets_that_depend_on_the_drafted_path(rule: str) -> None:
    """Penalties, bad words and biases see the row's own path: p of a context includes them."""
    params = SamplingParams(
        temperature=1.0,
        repetition_penalty=1.4,
        frequency_penalty=0.5,
        presence_penalty=0.3,
        bad_words=((1, 2),),
        logit_bias={0: 0.5},
        max_tokens=50,
    )
    toy = Toy(3, 3, 8, params)
    assert off(toy, chains(toy, 3), rule) < 1e-12


@pytest.mark.parametrize(("vocab", "width", "depth"), [(3, 2, 2), (4, 3, 1), (3, 3, 2), (2, 2, 3)])
def test_trees_drawn_without_replacement(vocab: int, width: int, depth: int) -> None:
    for seed in range(2):
        toy = Toy(vocab, depth, seed)
        assert off(toy, combs(toy, width, depth), "rejection") < 1e-12


def test_fixed_trees() -> None:
    toy = Toy(3, 2, 11)
    for paths in ([(0,), (1,)], [(2, 1), (2, 0), (0, 0)], [(1,), (0,), (2, 2), (2, 1), (2, 0)]):
        assert off(toy, iter([(1.0, tree_of(paths))]), "rejection") < 1e-12


def low(path: Path, q: Array) -> bool:
    return bool(q[path[-1]] < 0.4)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "stop",
    [
        lambda path, q: "end" if low(path, q) else "go",
        lambda path, q: "end" if path[-1] == 0 else "go",
    ],
    ids=["after an unlikely token", "after a token that ends the sequence"],
)
def test_draft_lengths_that_are_allowed(rule: str, stop: Callable[[Path, Array], str]) -> None:
    toy = Toy(3, 3, 2)
    assert off(toy, chains(toy, 3, stop), rule) < 1e-12


@pytest.mark.parametrize("rule", RULES)
def test_a_length_known_before_the_token_is_allowed(rule: str) -> None:
    toy = Toy(3, 3, 2)

    def drafts(path: Path, weight: float) -> Iterator[Draft]:
        q = toy.q[path]
        if len(path) == 3 or q.max() < 0.6:
            yield weight, chain(toy, path)
            return
        for token in np.flatnonzero(q).tolist():
            yield from drafts((*path, token), weight * q[token])

    assert off(toy, drafts((), 1.0), rule) < 1e-12


# Known-wrong variants -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "dropped",
    [low, lambda path, q: path[-1] == 0],
    ids=["an unlikely token", "a token that ends the sequence"],
)
def test_wrong_dropping_what_was_drawn(rule: str, dropped: Callable[[Path, Array], bool]) -> None:
    toy = Toy(3, 3, 2)
    assert off(toy, chains(toy, 3, lambda path, q: "drop" if dropped(path, q) else "go"), rule) > 1e-3


@pytest.mark.parametrize("rule", RULES)
def test_wrong_trimming_by_what_was_drafted_further_down(rule: str) -> None:
    toy = Toy(3, 2, 2)

    def drafts() -> Iterator[Draft]:
        for weight, tree in chains(toy, 2):
            first, second = tree.tokens
            confidence = toy.q[()][first] * toy.q[first,][second]
            yield weight, tree if confidence > 0.15 else chain(toy, ())

    assert off(toy, drafts(), rule) > 1e-3


def test_wrong_sharing_a_uniform_between_stopping_and_accepting() -> None:
    """Draft the token only if u < 0.6, and accept it with the same u."""
    toy, limit = Toy(3, 1, 2), 0.6
    drafts = [(1 - limit, chain(toy, ())), *((limit * weight, tree) for weight, tree in chains(toy, 1))]

    def shared(accept: float) -> tuple[float, float]:
        passes = min(accept, limit) / limit
        return passes, 1 - passes

    assert off(toy, iter(drafts), "rejection") < 1e-12
    assert off(toy, iter(drafts), "rejection", partial(rejection_branches, split=shared)) > 1e-3


def test_wrong_sorting_drawn_siblings() -> None:
    def likeliest_first(siblings: Path, q: Array) -> Path:
        return tuple(sorted(siblings, key=lambda token: -q[token]))

    assert max(off(toy, combs(toy, 2, 1, likeliest_first), "rejection") for toy in TOYS) > 1e-2


def test_wrong_pruning_drawn_siblings() -> None:
    def only_the_likeliest(siblings: Path, q: Array) -> Path:
        return (max(siblings, key=lambda token: q[token]),)

    assert max(off(toy, combs(toy, 2, 1, only_the_likeliest), "rejection") for toy in TOYS) > 1e-2


def test_wrong_forgetting_that_a_sibling_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_renormalising(
        p: torch.Tensor, q: torch.Tensor, tokens: torch.Tensor, uniforms: torch.Tensor
    ) -> torch.Tensor:
        accepted = torch.full((len(p),), NONE)
        for row in range(len(p)):
            for sibling, token in enumerate(tokens[row].tolist()):
                if token != NONE and uniforms[row, sibling] * q[row, token] < p[row, token]:
                    accepted[row] = sibling
                    break
                if token != NONE:
                    p[row] = (p[row] - q[row]).clamp(min=0)
                    p[row] /= p[row].sum()
                    q[row, token] = 0
        return accepted

    monkeypatch.setattr(rejection, "try_siblings", without_renormalising)
    branches = partial(rejection_branches, renormalise=False)
    assert max(off(toy, combs(toy, 2, 1), "rejection", branches) for toy in TOYS) > 1e-2
