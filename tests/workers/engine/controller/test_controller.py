"""Draft lengths, against sequences whose drafts are accepted with a known probability."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from tests.support.engine.sequences import sequence, step
from workers.engine import SpeculationConfig
from workers.engine.controller import make_controller
from workers.engine.verifier import Verdict


@dataclass
class Counts:
    steps: int = 0
    drafted: int = 0
    emitted: int = 0
    lengths: list[int] = field(default_factory=list)

    @property
    def tokens_per_step(self) -> float:
        return self.emitted / self.steps

    @property
    def drafted_per_step(self) -> float:
        return self.drafted / self.steps


def simulate(policy: str, acceptance: float, *, longest: int = 4, sequences: int = 48, batch: int = 12) -> Counts:
    controller = make_controller(SpeculationConfig(method="ngram", policy=policy, max_draft_tokens=longest))
    rng, counts = random.Random(1), Counts()
    waiting, running = [sequence(index) for index in range(sequences)], []
    while waiting or running:
        while waiting and len(running) < batch:
            running.append(waiting.pop())
        for seq, length in zip(list(running), controller.plan(running), strict=True):
            verdict = step(seq, length, acceptance, rng)
            controller.observe(verdict)
            counts.steps += 1
            counts.drafted += length
            counts.emitted += verdict.emitted
            counts.lengths.append(length)
            if seq.num_remaining == 0:
                running.remove(seq)
                controller.release(seq)
    return counts


@pytest.mark.parametrize("longest", [1, 4, 8])
@pytest.mark.parametrize("acceptance", [0.6, 0.7, 0.8, 0.9, 1.0])
def test_good_drafts_keep_their_length(acceptance: float, longest: int) -> None:
    fixed, threshold = (simulate(policy, acceptance, longest=longest) for policy in ("fixed", "threshold"))
    assert threshold.tokens_per_step > 0.95 * fixed.tokens_per_step


@pytest.mark.parametrize("acceptance", [0.0, 0.1, 0.2])
def test_bad_drafts_are_hardly_made(acceptance: float) -> None:
    assert simulate("threshold", acceptance).drafted_per_step < 0.2


def test_drafts_between_the_bounds_are_made_and_not_longer_than_they_are_worth() -> None:
    fixed, threshold = simulate("fixed", 0.5, longest=8), simulate("threshold", 0.5, longest=8)
    assert threshold.tokens_per_step > 0.9 * fixed.tokens_per_step
    assert threshold.drafted_per_step < 0.75 * fixed.drafted_per_step


@pytest.mark.parametrize("policy", ["fixed", "threshold"])
def test_no_draft_reaches_past_the_end(policy: str) -> None:
    controller = make_controller(SpeculationConfig(method="ngram", policy=policy, max_draft_tokens=6))
    seq, rng = sequence(0, tokens=20), random.Random(0)
    while seq.num_remaining:
        (length,) = controller.plan([seq])
        assert length < seq.num_remaining
        controller.observe(step(seq, length, 1.0, rng))


def test_a_sequence_that_turns_good_drafts_again() -> None:
    controller = make_controller(SpeculationConfig(method="ngram", policy="threshold"))
    seq, rng = sequence(0, tokens=4000), random.Random(0)
    lengths = []
    for acceptance, steps in ((0.0, 200), (1.0, 400)):
        for _ in range(steps):
            (length,) = controller.plan([seq])
            controller.observe(step(seq, length, acceptance, rng))
        lengths.append(length)
    assert lengths == [0, 4]


def test_methods_of_one_batch_are_told_apart() -> None:
    config = SpeculationConfig(method="ngram", row_methods=("suffix",), policy="threshold")
    controller = make_controller(config)
    rng = random.Random(0)
    for method, acceptance in (("ngram", 1.0), ("suffix", 0.0)):
        for index in range(20):
            seq = sequence(index, method=method)
            while seq.num_remaining:
                (length,) = controller.plan([seq])
                controller.observe(step(seq, length, acceptance, rng))
            controller.release(seq)
    assert controller.plan([sequence(0, method="ngram"), sequence(1, method="suffix")]) == [4, 1]


def test_steps_without_a_draft_say_nothing_of_acceptance() -> None:
    """A lookup that finds nothing must not shorten the drafts that it does find."""
    controller = make_controller(SpeculationConfig(method="ngram", policy="threshold"))
    seq = sequence(0, tokens=4000)
    controller.plan([seq])
    for _ in range(200):
        seq.tokens.append(1)
        controller.observe(Verdict(seq, 1, (), 0))
    assert controller.plan([seq]) == [2]
