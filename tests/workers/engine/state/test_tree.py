from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.engine.trees import tree_of
from workers.engine.state.tree import ROOT, DraftTree

paths = st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=6)


@given(paths)
def test_merging_paths_keeps_every_path_and_nothing_else(given_paths: list[list[int]]) -> None:
    tree = tree_of(given_paths)
    tree.check()
    prefixes = {tuple(path[: end + 1]) for path in given_paths for end in range(len(path))}
    found = {tuple(tree.tokens[n] for n in tree.path(node)) for node in range(len(tree))}
    assert found == prefixes
    assert len(tree) == len(prefixes)


@given(paths)
def test_depths_are_path_lengths(given_paths: list[list[int]]) -> None:
    tree = tree_of(given_paths)
    assert tree.depths() == [len(tree.path(node)) for node in range(len(tree))]


@given(paths)
def test_children_lead_to_every_node(given_paths: list[list[int]]) -> None:
    tree = tree_of(given_paths)
    children = tree.children()
    assert sum(map(len, children.values())) == len(tree)
    for node, (token, parent) in enumerate(zip(tree.tokens, tree.parents, strict=True)):
        assert children[parent][token] == node


def test_a_chain_is_a_tree_with_one_branch() -> None:
    assert DraftTree.chain([7, 8, 9]) == DraftTree((7, 8, 9), (ROOT, 0, 1))
    assert DraftTree.chain([7, 8, 9]).is_chain
    assert not tree_of([[1, 2], [1, 3]]).is_chain


@pytest.mark.parametrize(
    "tree",
    [
        DraftTree((1, 2), (1, ROOT)),
        DraftTree((1, 1), (ROOT, ROOT)),
        DraftTree((1, 2), (ROOT,)),
        DraftTree((1,), (-2,)),
    ],
    ids=["parent after child", "repeated sibling", "lengths differ", "no such parent"],
)
def test_malformed_trees_are_refused(tree: DraftTree) -> None:
    with pytest.raises(ValueError, match=r"."):
        tree.check()
