"""Policy `auto` in worlds with known costs and acceptance, on a clock of their own, against every fixed length."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest

from tests.support.engine.sequences import sequence, step
from workers.engine import EngineConfig, EngineCore, Request, SamplingParams, SpeculationConfig
from workers.engine.controller import StepCost, make_controller

LONGEST = 4
TOKENS = 256
PROMPT_ROWS, PROMPT_ROW_SECONDS = 20, 3e-4

PASSES: dict[str, Callable[[int], float]] = {
    "bound by memory": lambda rows: 0.016,
    "bound by memory, then by arithmetic": lambda rows: 0.016 + 9e-4 * max(0, rows - 4),
    "bound by arithmetic": lambda rows: 0.004 + 1e-3 * rows,
}


@dataclass(frozen=True)
class World:
    """What a pass and a level of a draft take, and how often drafts are accepted, sequence by sequence; how often a
    draft that is asked for is there."""

    seconds: Callable[[int], float]
    level: float
    acceptance: Sequence[float]
    batch: int
    offered: float = 1.0

    def tokens_per_second(self, policy: str, length: int = LONGEST) -> float:
        speculation = SpeculationConfig(method="ngram", policy=policy, max_draft_tokens=max(length, 1))
        controller = make_controller(speculation)
        rng, running, seconds = random.Random(1), [], 0.0
        waiting = [sequence(index, TOKENS) for index in range(max(16, 5 * self.batch))]
        tokens = TOKENS * len(waiting)
        while waiting or running:
            admitted = min(self.batch - len(running), len(waiting))
            running += [waiting.pop() for _ in range(admitted)]
            lengths = controller.plan(running) if length else [0] * len(running)
            offers = [planned if rng.random() < self.offered else 0 for planned in lengths]
            verdicts = [
                step(seq, offer, self.acceptance[seq.index % len(self.acceptance)], rng)
                for seq, offer in zip(running, offers, strict=True)
            ]
            rows, levels = len(running) + sum(offers), max(lengths)
            cost = StepCost(
                logit_rows=rows,
                prompt_rows=PROMPT_ROWS * admitted,
                drafting=sum(map(bool, lengths)),
                levels=levels,
                draft_seconds=levels * self.level,
                other_seconds=self.seconds(rows) * rng.uniform(0.95, 1.05)
                + PROMPT_ROWS * admitted * PROMPT_ROW_SECONDS,
            )
            seconds += cost.draft_seconds + cost.other_seconds
            for verdict in verdicts:
                controller.observe(verdict)
            controller.timed(cost)
            for seq in [seq for seq in running if not seq.num_remaining]:
                running.remove(seq)
                controller.release(seq)
        return tokens / seconds


@pytest.mark.parametrize("batch", [1, 8, 32])
@pytest.mark.parametrize("acceptance", [(0.2,), (0.7,), (0.2, 0.9)], ids=str)
@pytest.mark.parametrize("level", [0.0, 0.002], ids=lambda level: f"{1000 * level:g} ms a level")
@pytest.mark.parametrize("passes", PASSES)
def test_about_as_fast_as_the_best_length_that_could_have_been_set(
    passes: str, level: float, acceptance: tuple[float, ...], batch: int
) -> None:
    world = World(PASSES[passes], level, acceptance, batch)
    fixed = {length: world.tokens_per_second("fixed", length) for length in (0, 1, 2, LONGEST)}
    auto = world.tokens_per_second("auto")
    assert auto > 0.92 * max(fixed.values())
    assert auto > 0.95 * fixed[0]


@pytest.mark.parametrize("acceptance", [0.3, 0.9])
@pytest.mark.parametrize("offered", [0.05, 0.5])
@pytest.mark.parametrize("passes", PASSES)
def test_drafts_that_are_seldom_found(passes: str, offered: float, acceptance: float) -> None:
    world = World(PASSES[passes], 0.0, (acceptance,), 8, offered)
    fixed = {length: world.tokens_per_second("fixed", length) for length in (0, 1, 2, LONGEST)}
    auto = world.tokens_per_second("auto")
    assert auto > 0.93 * max(fixed.values())
    assert auto > 0.97 * fixed[0]


def test_sequences_get_lengths_of_their_own() -> None:
    controller = make_controller(SpeculationConfig(method="ngram", policy="auto"))
    rng, seqs = random.Random(0), [sequence(index, 10_000) for index in range(8)]
    drafted = [0, 0]
    for _ in range(400):
        lengths = controller.plan(seqs)
        for seq, length in zip(seqs, lengths, strict=True):
            drafted[seq.index % 2] += length
            controller.observe(step(seq, length, 0.9 if seq.index % 2 else 0.1, rng))
        rows = len(seqs) + sum(lengths)
        controller.timed(StepCost(rows, 0, sum(map(bool, lengths)), max(lengths), 0.0, 0.01 + 5e-4 * rows))
    assert drafted[1] > 5 * drafted[0]


def test_rows_that_ask_for_no_draft_take_no_part() -> None:
    controller = make_controller(SpeculationConfig(method="none", row_methods=("ngram",), policy="auto"))
    rng, seqs = random.Random(0), [sequence(0, 1000), sequence(1, 1000, method="ngram")]
    for _ in range(50):
        lengths = controller.plan(seqs)
        assert lengths[0] == 0
        for seq, length in zip(seqs, lengths, strict=True):
            controller.observe(step(seq, length, 1.0, rng))
        controller.timed(StepCost(2 + sum(lengths), 0, int(any(lengths)), max(lengths), 0.0, 0.01))
    assert lengths[1] == LONGEST


def test_a_load_that_changes_changes_the_plan() -> None:
    """Drafts that pay alone do not pay in a full batch, and pay again when the batch has drained."""
    controller = make_controller(SpeculationConfig(method="ngram", policy="auto"))
    rng, shares = random.Random(0), []
    for batch in (1, 64, 1):
        seqs, drafting = [sequence(index, 10_000) for index in range(batch)], 0
        for number in range(300):
            lengths = controller.plan(seqs)
            drafting += number >= 100 and any(lengths)
            for seq, length in zip(seqs, lengths, strict=True):
                controller.observe(step(seq, length, 0.6, rng))
            rows = batch + sum(lengths)
            seconds = PASSES["bound by memory, then by arithmetic"](rows)
            controller.timed(StepCost(rows, 0, sum(map(bool, lengths)), max(lengths), 0.0, seconds))
        shares.append(drafting / 200)
    assert shares[0] > 0.9
    assert shares[1] < 0.1
    assert shares[2] > 0.9


def test_steps_whose_prompts_seem_to_take_all_of_the_time_are_no_trouble() -> None:
    controller = make_controller(SpeculationConfig(method="ngram", policy="auto"))
    rng, seqs = random.Random(0), [sequence(index, 10_000) for index in range(2)]
    for rows, prompt_rows, seconds in [(6, 0, 0.01), (6, 0, 0.01), (6, 10, 1.0), (2, 1000, 0.01), (2, 1000, 0.01)]:
        controller.timed(StepCost(rows, prompt_rows, 0, 0, 0.0, seconds))
    for _ in range(20):
        lengths = controller.plan(seqs)
        for seq, length in zip(seqs, lengths, strict=True):
            controller.observe(step(seq, length, 0.5, rng))
        controller.timed(StepCost(2 + sum(lengths), 1000, sum(map(bool, lengths)), max(lengths), 0.0, 0.01))


@pytest.mark.parametrize("batch", [1, 2, 16])
def test_the_engine_drafts_where_a_pass_takes_its_time_whatever_its_rows(batch: int) -> None:
    """Passes of 16 ms for any number of rows, drafts for nothing, texts that repeat themselves."""
    speculation = SpeculationConfig(method="ngram", ngram_min=1, policy="auto")
    config = EngineConfig(target="scripted:order=1,eos_every=0", max_batch=batch, speculation=speculation)
    core = EngineCore(config)
    told = core.controller.timed
    core.controller.timed = lambda cost: told(replace(cost, draft_seconds=0.0, other_seconds=0.016))  # type: ignore[method-assign]
    for index in range(2 * batch):
        core.add(Request(index, [65 + index, 66], SamplingParams(max_tokens=96)))
    while core.has_work:
        core.step()
    total = core.snapshot()
    assert total.accepted > 0.5 * total.emitted
