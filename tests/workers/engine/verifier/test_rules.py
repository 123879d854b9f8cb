"""Small and odd cases of the rules, typical acceptance, and which rule fits which method."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.support.engine.trees import tree_of
from workers.engine import Request, SamplingParams, SpeculationConfig
from workers.engine.api.errors import InvalidConfig
from workers.engine.api.tree_shape import TreeShape
from workers.engine.sampler import RowContext, distributions, sample
from workers.engine.speculators.shared.drawing import DraftNoise
from workers.engine.speculators.shared.growth import TreeGrowth, extend_all
from workers.engine.state.batch import Feed
from workers.engine.state.sequence import Sequence
from workers.engine.state.tree import DraftTree
from workers.engine.verifier import BlockVerifier, TypicalVerifier, make_verifier
from workers.engine.verifier.noise import Place
from workers.engine.verifier.rules import NONE, choose, is_typical, try_siblings


def sequence(seed: int = 0, eos: frozenset[int] = frozenset(), **options: Any) -> Sequence:
    params = SamplingParams(**{"temperature": 1.0, "max_tokens": 20, "seed": seed, **options})
    return Sequence(Request(seed, [0], params), seed, eos, 1000)


def test_choosing_never_takes_what_has_no_weight() -> None:
    weights = torch.tensor([[0.0, 0.5, 0.0, 0.25, 0.0]]).repeat(4, 1)
    uniforms = torch.tensor([0.0, 0.66, 0.67, 1 - 2.0**-53], dtype=torch.float64)
    assert choose(weights, uniforms).tolist() == [1, 1, 3, 3]
    tiny = torch.tensor([[0.0, 1e-30, 0.0]])
    assert choose(tiny, uniforms[-1:]).tolist() == [1]


def test_nothing_impossible_is_accepted() -> None:
    """u = 0 against p = 0; what the draft thought likely does not matter."""
    p, q = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]])
    zero = torch.zeros(1, 1, dtype=torch.float64)
    assert try_siblings(p.clone(), q, torch.tensor([[0]]), zero).tolist() == [NONE]
    assert try_siblings(p.clone(), None, torch.tensor([[0]]), zero).tolist() == [NONE]
    assert try_siblings(p.clone(), None, torch.tensor([[1]]), zero).tolist() == [0]


def test_distributions_are_what_is_sampled() -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    options: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"top_k": 3},
        {"top_p": 0.6, "temperature": 0.5},
        {"min_p": 0.2, "logit_bias": {3: 4.0}},
    ]
    p = distributions(logits, [RowContext(sequence(**given)) for given in options])
    torch.testing.assert_close(p[0], logits[0].softmax(0))
    torch.testing.assert_close(p.sum(1), torch.ones(5))
    assert p[1].tolist() == torch.eye(40)[logits[1].argmax()].tolist()
    top = logits[2].topk(3)
    torch.testing.assert_close(p[2, top.indices], top.values.softmax(0))
    for seed in range(50):
        tokens = sample(logits, [RowContext(sequence(seed, **given)) for given in options]).tokens
        assert all(p[row, token] > 0 for row, token in enumerate(tokens))
    for dtype in (torch.bfloat16, torch.float64):
        rows = [RowContext(sequence())] * 5
        found = distributions(logits.to(dtype), rows)
        torch.testing.assert_close(found, logits.to(dtype).to(found.dtype).softmax(1), rtol=1e-5, atol=1e-7)


def test_rows_without_a_distribution_have_none() -> None:
    logits = torch.zeros(3, 4)
    logits[1] = -torch.inf
    logits[2, 0] = torch.nan
    for params in ({}, {"temperature": 0.0}):
        p = distributions(logits, [RowContext(sequence(**params))] * 3)
        assert p.sum(1).tolist() == [1.0, 0.0, 0.0]
        assert choose(p, torch.full((3,), 0.5, dtype=torch.float64)).tolist()[1:] == [-1, -1]


def test_a_place_has_numbers_of_its_own() -> None:
    places = [Place(1, start, depth) for start in range(40) for depth in range(33)]
    assert len({place.counter for place in places}) == len(places)


# Drafts drawn apart ---------------------------------------------------------------------------------------------------


def grow(seq: Sequence, shape: TreeShape, depth: int, logits: torch.Tensor) -> DraftTree:
    growth = TreeGrowth(seq, depth, shape, logits.shape[0] - 1, DraftNoise.APART)
    while growth.growing:
        extend_all([growth], logits.repeat(len(growth.frontier_paths()), 1))
    tree = growth.tree()
    tree.check()
    return tree


def test_a_drawn_token_that_ends_the_sequence_stays_and_ends_its_path() -> None:
    logits = torch.tensor([0.0, 0.0, 1.0, 9.0])  # token 3 is outside the target's vocabulary
    lengths = set()
    for seed in range(40):
        tree = grow(sequence(seed, eos=frozenset({2})), TreeShape(), 4, logits)
        assert 2 not in tree.tokens[:-1]
        assert 3 not in tree.tokens
        assert len(tree) == 4 or tree.tokens[-1] == 2
        assert tree.probabilities is not None
        torch.testing.assert_close(torch.stack(tree.probabilities), logits[:3].softmax(0).expand(len(tree), 3))
        lengths.add(len(tree))
    assert lengths == {1, 2, 3, 4}


def test_greedy_rows_keep_no_distribution() -> None:
    tree = grow(sequence(temperature=0.0), TreeShape.comb(2, 2), 2, torch.tensor([3.0, 2.0, 1.0, 0.0]))
    assert tree == DraftTree((0, 1, 0, 1), (-1, -1, 0, 0))
    assert tree.probabilities is None


def test_siblings_run_out_where_the_draft_has_no_more_to_offer() -> None:
    logits = torch.tensor([0.0, -torch.inf, 0.0, 0.0])
    tree = grow(sequence(), TreeShape.comb(3, 1), 1, logits)
    assert sorted(tree.tokens) == [0, 2]


def test_beams_are_refused() -> None:
    with pytest.raises(ValueError, match="beam"):
        TreeGrowth(sequence(), 2, TreeShape(2), 4, DraftNoise.APART)


def test_fixed_paths_without_gaps() -> None:
    shape = TreeShape(paths=((1,), (4,), (1, 2), (4, 0), (1, 0)))
    assert set(shape.without_gaps().paths) == {(0,), (1,), (0, 1), (0, 0), (1, 0)}
    assert TreeShape.comb(2, 3).without_gaps() == TreeShape.comb(2, 3)


# Typical acceptance ---------------------------------------------------------------------------------------------------

P = torch.tensor([0.5, 0.3, 0.15, 0.05])


def typical(tree: DraftTree, seed: int = 0, epsilon: float = 0.09, delta: float = 0.3) -> Sequence:
    seq = sequence(seed)
    TypicalVerifier(epsilon, delta).verify([Feed(seq, 0, 1, tree)], P.log().expand(1 + len(tree), 4), [0])
    return seq


def test_the_threshold_is_the_smaller_of_two() -> None:
    flat, peaked = torch.full((4,), 0.25), torch.tensor([0.97, 0.01, 0.01, 0.01])
    assert is_typical(torch.stack([P, flat, peaked]), 0.09, 0.3).tolist() == [
        [True, True, True, False],
        [True] * 4,
        [True, False, False, False],
    ]
    entropy = -(P * P.log()).sum().item()
    exactly = 0.3 * math.exp(-entropy)
    assert is_typical(P[None], 1.0, 0.3).tolist() == [[p > exactly for p in P.tolist()]]


@pytest.mark.parametrize(
    ("paths", "accepted"),
    [
        ([(0, 1), (1, 2, 0)], (1, 2, 0)),  # the longest
        ([(2, 0), (0, 1), (1, 1)], (0, 1)),  # the likeliest of equals: 0.15 beats 0.075 and 0.09
        ([(3, 0, 0), (2,)], (2,)),  # 3 is not typical
        ([(3,)], ()),
        ([()], ()),
    ],
)
def test_the_longest_typical_path_is_taken(paths: list[tuple[int, ...]], accepted: tuple[int, ...]) -> None:
    seq = typical(tree_of(paths))
    assert tuple(seq.output[:-1]) == accepted
    assert seq.stats.accepted == len(accepted)


@pytest.mark.parametrize("token", range(4))
def test_how_lossy_it_is(token: int) -> None:
    """A token that passes is always taken: total variation distance 1 - p(x) from the target. Else nothing is lost."""
    drawn = [typical(DraftTree.chain([token]), seed).output[0] for seed in range(300)]
    law = torch.bincount(torch.tensor(drawn), minlength=4) / len(drawn)
    distance = 0.5 * (law - P).abs().sum().item()
    if token < 3:
        assert distance == pytest.approx(1 - P[token].item(), abs=1e-6)
    else:
        assert distance < 0.1
        plain = [sample(P.log()[None], [RowContext(sequence(seed))]).tokens[0] for seed in range(300)]
        assert drawn == plain, "the token after the path is the one that plain decoding draws"


# What fits what -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"verify": "block", "method": "draft_model", "draft": "d", "tree_width": 2}, "block takes chains"),
        ({"verify": "block", "method": "ngram"}, "gains nothing with method ngram"),
        (
            {"verify": "rejection", "method": "draft_model", "draft": "d", "tree_width": 4, "tree_nodes": 8},
            "dynamic tree",
        ),
        ({"verify": "rejection"}, "method none drafts nothing"),
        ({"verify": "lossless", "method": "ngram"}, "verify must be one of"),
        ({"verify": "typical", "method": "ngram", "typical_epsilon": 0.0}, "typical_epsilon"),
        ({"verify": "typical", "method": "ngram", "typical_delta": 1.5}, "typical_delta"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidConfig, match=reason):
        SpeculationConfig(**options)


def test_every_rule_is_made_by_its_name() -> None:
    names = {
        rule: type(make_verifier(SpeculationConfig("draft_model", draft="d", verify=rule))).__name__
        for rule in ("exact", "rejection", "block", "typical")
    }
    assert names == {
        "exact": "CoupledVerifier",
        "rejection": "RejectionVerifier",
        "block": "BlockVerifier",
        "typical": "TypicalVerifier",
    }
    assert SpeculationConfig("ngram", verify="typical").label("ngram") == "ngram/typical"
    assert SpeculationConfig("ngram").label("ngram") == "ngram"


def test_block_verification_refuses_trees() -> None:
    tree = tree_of([(1,), (2,)])
    with pytest.raises(ValueError, match="chains"):
        BlockVerifier().verify([Feed(sequence(), 0, 1, tree)], torch.zeros(3, 4), [0])
