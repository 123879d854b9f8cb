"""How deep and wide drafts are: what the options say, the heads allow and a calibrated tree holds."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest

from tests.support.drafts.cores import medusa_core
from tests.support.engine.runs import run
from workers.engine import EngineCore, Request, SamplingParams, SpeculationConfig
from workers.engine.api.errors import InvalidConfig, UnsupportedModel
from workers.engine.speculators.medusa.tree import calibrate_tree, write_tree
from workers.engine.state.sequence import Sequence
from workers.engine.state.tree import DraftTree


def paths_of(depth: int) -> tuple[tuple[int, ...], ...]:
    return tuple((0,) * level for level in range(1, depth + 1))


def deepest(core: EngineCore) -> int:
    """Depth of the deepest tree that an answer was drafted with."""
    depths: list[int] = []
    propose = core.speculator.propose

    def watched(seqs: Seq[Sequence], lengths: Seq[int]) -> list[DraftTree]:
        trees = propose(seqs, lengths)
        depths.extend(max(tree.depths(), default=0) for tree in trees)
        return trees

    core.speculator.propose = watched  # type: ignore[method-assign]
    run(core, [Request(0, [5, 6, 7], SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True))])
    return max(depths)


@pytest.mark.parametrize(
    ("heads", "options", "depth"),
    [
        (2, {}, 2),
        (5, {}, 5),
        (5, {"tree_width": 1}, 5),
        (5, {"tree_width": 2, "verify": "rejection"}, 5),
        (5, {"max_draft_tokens": 3}, 3),
        (5, {"tree_paths": paths_of(5)}, 5),
        (5, {"tree_paths": paths_of(2)}, 2),
        (5, {"row_methods": ("self",), "exit_layer": 1}, 5),
    ],
    ids=str,
)
def test_drafts_are_as_deep_as_the_heads_unless_the_options_say_otherwise(
    heads: int, options: dict[str, Any], depth: int, tmp_path: Path
) -> None:
    core = medusa_core(heads, tmp_path, **options)
    assert core.report()["speculator"]["max_draft_tokens"] == depth
    assert deepest(core) == depth


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_draft_tokens": 3}, "max_draft_tokens is 3, but .* has 2 heads, one for each token: take 2 or less"),
        ({"tree_paths": paths_of(3)}, "tree_paths is 3 tokens deep, but .* has 2 heads"),
    ],
    ids=str,
)
def test_more_tokens_than_heads_are_refused_to_those_who_ask_for_them(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidConfig, match=message):
        medusa_core(2, tmp_path, **options)


@pytest.mark.parametrize(("options", "depth"), [({}, 5), ({"max_draft_tokens": 2}, 2), ({"tree_width": 1}, 6)])
def test_a_calibrated_tree_is_drafted_whole(options: dict[str, Any], depth: int, tmp_path: Path) -> None:
    write_tree(tmp_path, calibrate_tree([[(0,) * 5]], 9))
    assert deepest(medusa_core(6, tmp_path, **options)) == depth


def test_a_calibrated_tree_of_more_heads_is_refused(tmp_path: Path) -> None:
    write_tree(tmp_path, calibrate_tree([[(0, 0, 0)]], 9))
    with pytest.raises(UnsupportedModel, match=r"medusa_tree\.json: the tree is 3 tokens deep, but there are 2 heads"):
        medusa_core(2, tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "medusa"}, "method medusa needs a draft"),
        ({"method": "ngram", "draft": "d"}, "only draft_model, medusa, eagle take a draft"),
        ({"method": "eagle", "draft": "d", "row_methods": ("medusa",)}, "eagle and medusa would share one draft"),
        ({"method": "ngram", "tree_nodes": 5}, "drafts of method ngram are chains"),
        ({"method": "eagle", "draft": "d", "tree_width": 17}, "tree_width must be 1 to 16"),
        ({"method": "eagle", "draft": "d", "tree_nodes": 0}, "tree_nodes must be 1 to 256"),
        ({"method": "eagle", "draft": "d", "tree_width": 1, "tree_nodes": 9}, "no effect on a chain"),
        ({"method": "eagle", "draft": "d", "tree_width": 2, "tree_paths": ((0,),)}, "drop tree_width and tree_nodes"),
        ({"method": "eagle", "draft": "d", "tree_paths": ((0, 0),)}, "has no parent"),
        ({"method": "eagle", "draft": "d", "tree_paths": [0, 1]}, "must be a list of lists"),
        ({"method": "eagle", "draft": "d", "tree_paths": [["a"]]}, "must be a list of lists"),
        ({"method": "eagle", "draft": "d", "tree_paths": ((0,), (0, 0)), "max_draft_tokens": 1}, "2 tokens deep"),
        (
            {
                "method": "self",
                "exit_layer": 1,
                "tree_paths": tuple((0,) * n for n in range(1, 6)),
                "max_draft_tokens": 4,
            },
            "5 tokens deep",
        ),
        ({"method": "eagle", "draft": "d", "tree_nodes": 9, "verify": "rejection"}, "cannot take a dynamic tree"),
        ({"method": "eagle", "draft": "d", "tree_paths": ((0,),), "verify": "block"}, "takes chains, not trees"),
    ],
)
def test_options_that_contradict_each_other(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        SpeculationConfig(**options)


def test_what_grows_where_nothing_is_set() -> None:
    def shape(**options: Any) -> tuple[int, int | None]:
        found = SpeculationConfig(draft="d", **options).tree_shape
        return found.width, found.nodes

    assert shape(method="draft_model") == (1, None)
    assert shape(method="eagle") == shape(method="medusa") == (4, 16)
    assert shape(method="eagle", tree_width=1) == (1, None)
    assert shape(method="eagle", tree_width=3) == (3, None)
    assert shape(method="draft_model", tree_nodes=9) == (4, 9)
    assert shape(method="eagle", verify="rejection") == shape(method="eagle", verify="block") == (1, None)
