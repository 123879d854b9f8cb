"""Draft trees as tests write them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from workers.engine.state.tree import ROOT, DraftTree


def tree_of(paths: Iterable[Sequence[int]]) -> DraftTree:
    """Merge root-to-leaf token paths; common prefixes become one node."""
    tokens: list[int] = []
    parents: list[int] = []
    index: dict[tuple[int, int], int] = {}
    for path in paths:
        node = ROOT
        for token in path:
            child = index.get((node, token))
            if child is None:
                child = index[node, token] = len(tokens)
                tokens.append(token)
                parents.append(node)
            node = child
    return DraftTree(tuple(tokens), tuple(parents))
