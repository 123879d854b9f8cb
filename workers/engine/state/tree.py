"""A draft tree is a value: tokens and parents. Everything else about its shape is derived here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

ROOT = -1
"""The parent of first-level nodes: the last token of the sequence itself."""


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Proposed tokens with parents.

    `parents[i]` is an earlier node's index or ROOT. Siblings carry distinct tokens. A chain is a tree in which
    parents[i] = i - 1; the empty tree is plain decoding.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    probabilities: tuple[torch.Tensor, ...] | None = field(default=None, compare=False, repr=False)
    """What the children of each parent were drawn from: [V'] for each node that has children, or the root, in the order
    of its first child. Siblings then lie in the order in which they were drawn, without replacement. Kept only for
    verification rules that need it. None: fixed drafts, and those drawn with the target's own noise."""

    @classmethod
    def chain(cls, tokens: Iterable[int]) -> DraftTree:
        path = tuple(tokens)
        return cls(path, tuple(range(-1, len(path) - 1)))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    def depths(self) -> list[int]:
        """Depth of each node; first-level nodes have depth 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return depths

    def path(self, node: int) -> list[int]:
        """Node indices from the first level down to `node`."""
        path: list[int] = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def children(self) -> dict[int, dict[int, int]]:
        """parent -> {token -> child}, for the descent of the verifier."""
        children: dict[int, dict[int, int]] = {}
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            children.setdefault(parent, {})[token] = node
        return children

    def check(self) -> None:
        """Raise ValueError when parents do not precede their children or siblings repeat a token."""
        if len(self.tokens) != len(self.parents):
            raise ValueError(f"{len(self.tokens)} tokens but {len(self.parents)} parents")
        for node, parent in enumerate(self.parents):
            if not ROOT <= parent < node:
                raise ValueError(f"node {node} has parent {parent}; parents come before their children")
        if len(set(zip(self.parents, self.tokens, strict=True))) != len(self.tokens):
            raise ValueError("siblings repeat a token")


EMPTY = DraftTree()
