"""Which candidates of which head a Medusa tree should hold: measured on text, stored beside the heads.

A *rank tuple* of a position says where the tokens that really followed stand in the heads' lists: (0, 2) when the first
head had the next one on top and the second head had the one after it third. A tree holds a path for a prefix of ranks;
a step accepts as many tokens as the longest prefix of its rank tuple that the tree holds.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

from workers.engine.errors import UnsupportedModel
from workers.engine.tree_shape import RankPath, TreeShape

TREE_FILE = "medusa_tree.json"


@dataclass(frozen=True, slots=True)
class CalibratedTree:
    """Paths, best first, and how often the text followed each, as a share of the positions."""

    paths: tuple[RankPath, ...]
    frequencies: tuple[float, ...]
    positions: int
    """Places in the text that were looked at."""

    @property
    def expected_tokens(self) -> float:
        """Tokens per step on the text that it was made from: accepted ones and the bonus."""
        return 1.0 + sum(self.frequencies)

    def cut(self, nodes: int) -> CalibratedTree:
        return CalibratedTree(self.paths[:nodes], self.frequencies[:nodes], self.positions)


def calibrate_tree(rank_tuples: Iterable[Seq[int]], max_nodes: int) -> CalibratedTree:
    """The tree of at most `max_nodes` nodes that accepts most on these rank tuples.

    A prefix is at least as frequent as whatever starts with it, so the most frequent prefixes form a tree, and no other
    tree of as many nodes accepts more. Unlike products of each head's accuracy this sees what goes together.
    """
    counts: Counter[RankPath] = Counter()
    positions = 0
    for ranks in rank_tuples:
        positions += 1
        counts.update(tuple(ranks[:depth]) for depth in range(1, len(ranks) + 1))
    best = sorted(counts.items(), key=lambda item: (-item[1], len(item[0]), item[0]))[:max_nodes]
    return CalibratedTree(tuple(path for path, _ in best), tuple(count / positions for _, count in best), positions)


def fastest_size(tree: CalibratedTree, seconds: Mapping[int, float]) -> CalibratedTree:
    """Cut the tree where expected tokens per second are highest; `seconds` is the time of a step by tree nodes."""
    sizes = [size for size in seconds if 0 < size <= len(tree.paths)]
    if not sizes:
        return tree
    return tree.cut(max(sizes, key=lambda size: tree.cut(size).expected_tokens / seconds[size]))


def write_tree(directory: Path, tree: CalibratedTree) -> None:
    content = {
        "paths": tree.paths,
        "frequencies": [round(frequency, 6) for frequency in tree.frequencies],
        "positions": tree.positions,
    }
    (directory / TREE_FILE).write_text(json.dumps(content) + "\n")


def read_tree(directory: Path) -> TreeShape | None:
    """The tree stored beside the heads, if there is one. Raises `UnsupportedModel` when it is no tree."""
    file = directory / TREE_FILE
    if not file.is_file():
        return None
    try:
        paths = json.loads(file.read_text())["paths"]
        shape = TreeShape(paths=tuple(tuple(int(rank) for rank in path) for path in paths))
    except (ValueError, TypeError, KeyError) as error:
        raise UnsupportedModel(f"{file}: not a tree of rank paths ({error})") from error
    if not shape.paths:
        raise UnsupportedModel(f"{file}: the tree is empty")
    return shape
