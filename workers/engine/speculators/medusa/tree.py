"""Which candidates of which head a Medusa tree should hold: measured on text, stored beside the heads.

A *rank tuple* of a position says where the tokens that really followed stand in the heads' lists: (0, 2) when the first
head had the next one on top and the second head had the one after it third. A tree holds a path for a prefix of ranks;
a step accepts as many tokens as the longest prefix of its rank tuple that the tree holds.

A step begins behind the token that the one before it missed, and what follows a miss is harder than the rest. So what a
tree yields is found by walking the text as decoding does, not by averaging over its positions.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from pathlib import Path

from workers.engine.api.errors import UnsupportedModel
from workers.engine.api.tree_shape import RankPath, TreeShape

TREE_FILE = "medusa_tree.json"

Answer = Seq[Seq[int]]
"""The rank tuples of one answer in order, one for each of its tokens but the first."""


@dataclass(frozen=True, slots=True)
class CalibratedTree:
    """Paths, best first, and how often the text followed each, as a share of the positions."""

    paths: tuple[RankPath, ...]
    frequencies: tuple[float, ...]
    positions: int
    """Places in the text that were looked at."""
    answers: tuple[Answer, ...] = field(default=(), repr=False)
    """The text that it was made from."""

    @property
    def expected_tokens(self) -> float:
        """Tokens per step of a run that decodes this text with this tree, as statistics count them."""
        paths = frozenset(self.paths)
        tokens = sum(len(answer) + 1 for answer in self.answers)
        return tokens / max(1, sum(_steps(answer, paths) for answer in self.answers))

    def cut(self, nodes: int) -> CalibratedTree:
        return replace(self, paths=self.paths[:nodes], frequencies=self.frequencies[:nodes])


def _steps(answer: Answer, paths: frozenset[RankPath]) -> int:
    """Steps that decode it: the one that ends the prompt drafts nothing, and the last token is never drafted."""
    steps, done = 1, 0
    while done < len(answer):
        ranks = answer[done][: len(answer) - done - 1]
        accepted = next((depth for depth in range(len(ranks), 0, -1) if tuple(ranks[:depth]) in paths), 0)
        steps, done = steps + 1, done + accepted + 1
    return steps


def calibrate_tree(answers: Iterable[Answer], max_nodes: int) -> CalibratedTree:
    """The tree of at most `max_nodes` nodes that accepts most on these answers, were every position as likely to begin
    a step.

    A prefix is at least as frequent as whatever starts with it, so the most frequent prefixes form a tree, and no other
    tree of as many nodes accepts more. Unlike products of each head's accuracy this sees what goes together.
    """
    texts = tuple(answers)
    counts = Counter(tuple(ranks[:end]) for answer in texts for ranks in answer for end in range(1, len(ranks) + 1))
    positions = sum(map(len, texts))
    best = sorted(counts.items(), key=lambda item: (-item[1], len(item[0]), item[0]))[:max_nodes]
    frequencies = tuple(count / positions for _, count in best)
    return CalibratedTree(tuple(path for path, _ in best), frequencies, positions, texts)


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
