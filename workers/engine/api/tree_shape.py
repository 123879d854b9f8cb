"""How a draft tree may grow: chain, beam, fixed rank paths, or EAGLE-2's dynamic tree."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from typing import Any

RankPath = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TreeShape:
    """One of three rules.

    beam (`width` alone): each level keeps the best `width` candidates of all its parents; width 1 is a chain.
    fixed (`paths`): rank paths as in Medusa's `medusa_choices`: (0, 2) is the third-best child of the best child.
    dynamic (`nodes`): EAGLE-2 (arXiv 2406.16858): the best `width` nodes of each level get their best `width` children,
    and of all these candidates the best `nodes` make the tree.
    """

    width: int = 1
    nodes: int | None = None
    paths: tuple[RankPath, ...] = ()

    def __post_init__(self) -> None:
        if self.width < 1 or (self.nodes is not None and self.nodes < 1):
            raise ValueError(f"a tree needs width and nodes of at least 1, got {self.width} and {self.nodes}")
        if self.paths and (self.nodes is not None or self.width != 1):
            raise ValueError("a tree has fixed paths or a width, not both")
        known = set(self.paths)
        for path in self.paths:
            if not path or min(path) < 0 or (len(path) > 1 and path[:-1] not in known):
                raise ValueError(f"rank path {path} has no parent among the paths, or a negative rank, or is empty")

    @classmethod
    def comb(cls, width: int, depth: int) -> TreeShape:
        """Every level has `width` siblings, of which the first one goes on."""
        return cls(paths=tuple((0,) * level + (rank,) for level in range(depth) for rank in range(width)))

    def without_gaps(self) -> TreeShape:
        """Fixed paths with siblings numbered 0, 1, 2, ...: for candidates in the order in which they are drawn."""
        return _without_gaps(self)

    def described(self) -> dict[str, Any]:
        """As JSON values, with a hash of the paths that is equal for equal trees in whatever order they are listed."""
        if not self.paths:
            return {"width": self.width, "nodes": self.nodes}
        paths = [list(path) for path in sorted(self.paths)]
        content_hash = blake2b(repr(paths).encode(), digest_size=16).hexdigest()
        return {"num_paths": len(paths), "content_hash": content_hash, "paths": paths}

    def max_nodes(self, depth: int) -> int:
        """Most nodes of a tree of that depth."""
        if self.paths:
            return sum(len(path) <= depth for path in self.paths)
        beam = self.width * depth
        if self.nodes is None:
            return beam
        return min(self.nodes, self.width + self.width**2 * (depth - 1)) if depth else 0

    def max_expanded(self, depth: int) -> int:
        """Most nodes that are fed to a drafter while the tree grows: all but the last level's."""
        if self.paths:
            return sum(len(path) < depth for path in self.paths)
        return self.width * max(0, depth - 1)

    @property
    def max_depth(self) -> int | None:
        """Depth of the fixed paths; None where the length is free."""
        return max(map(len, self.paths)) if self.paths else None


@lru_cache(maxsize=64)
def _without_gaps(shape: TreeShape) -> TreeShape:
    renamed: dict[RankPath, RankPath] = {(): ()}
    counts: dict[RankPath, int] = {}
    for path in sorted(shape.paths, key=lambda path: (len(path), path)):
        parent = renamed[path[:-1]]
        renamed[path] = (*parent, counts.get(parent, 0))
        counts[parent] = counts.get(parent, 0) + 1
    return replace(shape, paths=tuple(renamed[path] for path in shape.paths))
