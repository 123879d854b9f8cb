"""Exact laws of the real verifier on tiny vocabularies: every draft, and every way that its random numbers may fall.

The thresholds come from a second implementation in plain numpy. The numbers handed to the verifier lie just on either
side of them, so a verifier that decides elsewhere, or draws from something else, gives another law.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from workers.engine import Request, SamplingParams
from workers.engine.sampler import RowContext, distributions
from workers.engine.state.batch import Feed
from workers.engine.state.sequence import Sequence
from workers.engine.state.tree import ROOT, DraftTree
from workers.engine.verifier import Verifier
from workers.engine.verifier.noise import Noise, Place

Path = tuple[int, ...]
Array = np.ndarray
CLOSE = 1e-9
"""How near to a threshold the verifier is tried, relatively."""


class Toy:
    """Target and draft over V tokens: a distribution for every context, some with zeros, some alike, some one-hot."""

    def __init__(self, vocab: int, depth: int, seed: int, params: SamplingParams | None = None) -> None:
        self.vocab, self.depth = vocab, depth
        self.params = params or SamplingParams(temperature=1.0, max_tokens=50)
        rng = np.random.default_rng(seed)
        self.contexts = [path for length in range(depth + 1) for path in itertools.product(range(vocab), repeat=length)]
        self.logits = {path: _logits(rng, vocab) for path in self.contexts}
        rows = torch.tensor(np.stack(list(self.logits.values())))
        p = distributions(rows, [RowContext(self.sequence(), path) for path in self.contexts])
        self.p = dict(zip(self.contexts, p.numpy(), strict=True))
        self.q = {path: _proposal(rng, self.p[path]) for path in self.contexts}

    def sequence(self, index: int = 0) -> Sequence:
        return Sequence(Request(index, [0], replace(self.params, seed=index)), index, frozenset(), 1000)

    def product(self, length: int) -> Array:
        """[V, ..., V]: probability of every output of that length."""
        law = np.ones(())
        for step in range(length):
            rows = [self.p[path] for path in itertools.product(range(self.vocab), repeat=step)]
            law = law[..., None] * np.stack(rows).reshape((self.vocab,) * (step + 1))
        return law

    def after(self, path: Path, length: int) -> Array:
        """[V, ..., V]: probability of every continuation of `path` to `length` tokens."""
        law = np.ones(())
        for step in range(length - len(path)):
            rows = [self.p[path + rest] for rest in itertools.product(range(self.vocab), repeat=step)]
            law = law[..., None] * np.stack(rows).reshape((self.vocab,) * (step + 1))
        return law


def _logits(rng: np.random.Generator, vocab: int) -> Array:
    logits = rng.normal(size=vocab) * rng.choice([0.3, 1.0, 2.5])
    if rng.random() < 0.25:
        logits[rng.integers(vocab)] = -np.inf
    return logits


def _proposal(rng: np.random.Generator, p: Array) -> Array:
    kind = rng.random()
    if kind < 0.15:
        return p.copy()
    q = rng.dirichlet(np.ones(len(p)))
    if kind < 0.3:
        q[rng.integers(len(p))] = 0.0
    elif kind < 0.4:
        q = np.eye(len(p))[rng.integers(len(p))]
    return q / q.sum()


# Drafts: (probability, tree) ------------------------------------------------------------------------------------------

Draft = tuple[float, DraftTree]


def chains(toy: Toy, length: int, stop: Callable[[Path, Array], str] | None = None) -> Iterator[Draft]:
    """Every chain drawn from q. `stop(path, q)` of a path just drawn: "go", "end" with it, or "drop" its last token."""

    def grow(path: Path, weight: float) -> Iterator[tuple[float, Path]]:
        if len(path) == length:
            yield weight, path
            return
        q = toy.q[path]
        for token in np.flatnonzero(q > 0).tolist():
            longer = (*path, token)
            verdict = stop(longer, q) if stop else "go"
            if verdict == "go":
                yield from grow(longer, weight * q[token])
            else:
                yield weight * q[token], longer if verdict == "end" else path

    for weight, path in grow((), 1.0):
        yield weight, chain(toy, path)


def chain(toy: Toy, path: Path) -> DraftTree:
    rows = [toy.q[path[:depth]] for depth in range(len(path))]
    probabilities = tuple(map(torch.from_numpy, rows)) if rows else None
    return DraftTree(path, tuple(range(-1, len(path) - 1)), probabilities)


def combs(
    toy: Toy, width: int, depth: int, order: Callable[[Path, Array], Path] = lambda siblings, q: siblings
) -> Iterator[Draft]:
    """Trees of `width` siblings drawn without replacement, of which the first goes on, in every order of draws."""

    def grow(path: Path, parent: int, tree: tuple[Path, Path, tuple[Array, ...]], weight: float) -> Iterator[Draft]:
        tokens, parents, rows = tree
        if len(path) == depth:
            yield weight, DraftTree(tokens, parents, tuple(map(torch.from_numpy, rows)))
            return
        q = toy.q[path]
        for siblings in itertools.permutations(range(toy.vocab), min(width, int(np.count_nonzero(q)))):
            if chance := _chance(q, siblings):
                placed = order(siblings, q)
                longer = (*tokens, *placed), (*parents, *[parent] * len(placed)), (*rows, q)
                yield from grow((*path, placed[0]), len(tokens), longer, weight * chance)

    yield from grow((), ROOT, ((), (), ()), 1.0)


def _chance(q: Array, siblings: Path) -> float:
    """Probability of drawing these, in this order, without replacement."""
    chance, left = 1.0, 1.0
    for token in siblings:
        chance *= q[token] / left if left > 0 else 0.0
        left -= q[token]
    return chance


# Branches: how the random numbers may fall ----------------------------------------------------------------------------


@dataclass
class Branch:
    """Numbers for one run of the verifier, and how likely such numbers are."""

    weight: float
    accept: dict[tuple[int, int], float] = field(default_factory=dict)
    """(depth, sibling) -> uniform"""
    choose: dict[int, float] = field(default_factory=dict)
    """depth -> uniform"""


def below(threshold: float) -> float:
    return min(threshold * (1 - CLOSE), 1 - 2.0**-53)


def above(threshold: float) -> float:
    return threshold * (1 + CLOSE)


Split = Callable[[float], tuple[float, float]]
"""Acceptance probability -> the probabilities with which the uniform is seen below and above it."""


def rejection_branches(
    toy: Toy, tree: DraftTree, *, split: Split = lambda a: (a, 1 - a), renormalise: bool = True
) -> Iterator[Branch]:
    children = tree.children()
    draws = {parent: index for index, parent in enumerate(children)}

    def walk(node: int, path: Path, branch: Branch) -> Iterator[Branch]:
        p = toy.p[path]
        q = None if tree.probabilities is None or node not in draws else tree.probabilities[draws[node]].numpy().copy()
        for sibling, (token, child) in enumerate(children.get(node, {}).items()):
            proposal = np.eye(toy.vocab)[token] if q is None else q
            accept = min(1.0, p[token] / proposal[token])
            passes, fails = split(accept)
            place = len(path), sibling
            if passes > 0:
                lower = {**branch.accept, place: below(accept)}
                yield from walk(child, (*path, token), Branch(branch.weight * passes, lower))
            if fails <= 0:
                return
            branch = Branch(branch.weight * fails, {**branch.accept, place: above(accept)})
            p = np.maximum(p - proposal, 0)
            p = p / p.sum()
            if q is not None:
                q[token] = 0
                q = q / q.sum() if renormalise and q.sum() > 0 else q
        yield from chosen(branch, len(path), p)

    yield from walk(ROOT, (), Branch(1.0))


def block_branches(toy: Toy, tree: DraftTree) -> Iterator[Branch]:
    path, length = tree.tokens, len(tree)
    weight, thresholds, finals = 1.0, [], []
    for depth in range(length + 1):
        p = toy.p[path[:depth]]
        if depth == length:
            thresholds.append(weight)
            finals.append(p)
            break
        token = path[depth]
        q = np.eye(toy.vocab)[token] if tree.probabilities is None else tree.probabilities[depth].numpy()
        rest = np.maximum(weight * p - q, 0)
        mass = rest.sum()
        thresholds.append(mass / (mass + 1 - weight) if mass + 1 - weight > 0 else 1.0)
        finals.append(rest / mass if mass > 0 else p)
        weight = min(1.0, weight * p[token] / q[token])
    for depth, final in enumerate(finals):
        chance = (thresholds[depth] if depth else 1.0) * np.prod([1 - h for h in thresholds[depth + 1 :]])
        if chance > 0:
            accept = {(level, 0): above(thresholds[level]) for level in range(depth + 1, length + 1)}
            accept.update({(level, 0): 0.5 for level in range(1, depth)})
            accept[depth, 0] = below(thresholds[depth])
            yield from chosen(Branch(chance, accept), depth, final)


def chosen(branch: Branch, depth: int, weights: Array) -> Iterator[Branch]:
    """Every token that may be drawn, at both ends of its interval of the distribution function."""
    ends = np.cumsum(weights) / weights.sum()
    for token in np.flatnonzero(weights > 0).tolist():
        start = ends[token - 1] if token else 0.0
        width = ends[token] - start
        for uniform in (start + width * 1e-6, start + width * (1 - 1e-6)):
            yield Branch(branch.weight * width / 2, branch.accept, {depth: uniform})


# Laws -----------------------------------------------------------------------------------------------------------------


class TableNoise:
    """Hands out what each sequence's branch says; a number that it does not foresee is an error."""

    def __init__(self) -> None:
        self.branches: dict[int, Branch] = {}

    def accept(self, places: Seq[Place], count: int) -> torch.Tensor:
        # Siblings behind an accepted one, and ragged rows, are never looked at: a NaN would pass no comparison.
        rows = [[self.branches[at.key].accept.get((at.depth, j), np.nan) for j in range(count)] for at in places]
        return torch.tensor(rows, dtype=torch.float64)

    def choose(self, places: Seq[Place]) -> torch.Tensor:
        return torch.tensor([self.branches[at.key].choose[at.depth] for at in places], dtype=torch.float64)


def law(
    toy: Toy,
    drafts: Iterable[Draft],
    branches: Callable[[Toy, DraftTree], Iterator[Branch]],
    make: Callable[[Noise], Verifier],
) -> Array:
    """[V, ..., V]: probability of every output of depth + 1 tokens, all cases verified in one ragged batch."""
    noise, feeds, rows, offsets, weights = TableNoise(), [], [], [], []
    for draft_weight, tree in drafts:
        for branch in branches(toy, tree):
            seq = toy.sequence(len(feeds))
            noise.branches[seq.key] = branch
            feeds.append(Feed(seq, 0, 1, tree))
            weights.append(draft_weight * branch.weight)
            offsets.append(len(rows))
            rows.append(toy.logits[()])
            rows.extend(toy.logits[tuple(tree.tokens[n] for n in tree.path(node))] for node in range(len(tree)))
    verdicts = make(noise).verify(feeds, torch.tensor(np.stack(rows)), offsets)
    result = np.zeros((toy.vocab,) * (toy.depth + 1))
    for verdict, weight in zip(verdicts, weights, strict=True):
        output = tuple(verdict.seq.output)
        assert verdict.emitted == len(output) == len(verdict.path) + 1
        result[output] += weight * toy.after(output, toy.depth + 1)
    return result
