"""Draft trees written straight from their definitions: no batch, no cache, one path at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from workers.engine.api.tree_shape import TreeShape
from workers.engine.kernels.cpu.philox import gumbel_rows
from workers.engine.state.sequence import Sequence
from workers.engine.state.tree import DraftTree

Path = tuple[int, ...]
Model = Callable[[Path], torch.Tensor]
"""A drafter: the path drafted so far -> logits [V] of the next token."""
Nodes = set[Path]
"""A tree: the token paths from the root to each of its nodes."""


def nodes_of(tree: DraftTree) -> Nodes:
    tree.check()
    return {tuple(tree.tokens[node] for node in tree.path(leaf)) for leaf in range(len(tree))}


def expected_nodes(model: Model, seq: Sequence, depth: int, shape: TreeShape) -> Nodes:
    if shape.paths:
        return set(_fixed(model, seq, depth, shape))
    levels = _levels(model, seq, depth, shape.width, prune=shape.nodes is None)
    found = [candidate for level in levels for candidate in level]
    return set(_best(found, len(found) if shape.nodes is None else shape.nodes))


def _levels(model: Model, seq: Sequence, depth: int, width: int, *, prune: bool) -> Iterator[list[tuple[Path, float]]]:
    """The best `width` of each level get their best `width` children. A beam keeps no others; EAGLE-2 keeps all of
    them, and chooses among them in the end."""
    frontier: list[tuple[Path, float]] = [((), 0.0)]
    for _ in range(depth):
        level = [
            ((*path, token), score + gain)
            for path, score in frontier
            for token, gain in _ranked(model, seq, path)[:width]
            if token not in seq.eos_token_ids
        ]
        best = set(_best(level, width))
        frontier = [candidate for candidate in level if candidate[0] in best]
        yield frontier if prune else level


def _best(candidates: list[tuple[Path, float]], count: int) -> list[Path]:
    """Of equals the one that was found first."""
    return [path for path, _ in sorted(candidates, key=lambda candidate: -candidate[1])[:count]]


def _fixed(model: Model, seq: Sequence, depth: int, shape: TreeShape) -> Iterator[Path]:
    """The child of rank r is the r-th best; what ends the sequence is left out, and all below it."""
    for ranks in shape.paths:
        path: Path = ()
        for rank in ranks[:depth]:
            token = _ranked(model, seq, path)[rank][0]
            if token in seq.eos_token_ids:
                break
            path = (*path, token)
        else:
            if len(ranks) <= depth:
                yield path


def _ranked(model: Model, seq: Sequence, path: Path) -> list[tuple[int, float]]:
    """Tokens after a path, best first, and what each adds to its score: log q when greedy; with temperature, what it
    gives away against the best one by log q + the noise which the target will draw that very position with."""
    logits, temperature = model(path), seq.params.temperature
    if temperature == 0.0:
        scores = logits.double().log_softmax(-1)
    else:
        noise = gumbel_rows([seq.key], [len(seq) + len(path)], len(logits))[0]
        scores = (logits.double() / temperature).log_softmax(-1) + noise
        scores = scores - scores.max()
    order = sorted(range(len(logits)), key=lambda token: -float(scores[token]))
    return [(token, float(scores[token])) for token in order if scores[token] > -torch.inf]
