"""Trees from calibration: the best for the text they were made from, stored beside the heads, and used."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import product
from pathlib import Path

import pytest
import torch

from tests.support.drafts.reference import medusa_logits
from tests.support.drafts.weights import chained_heads, random_heads, tiny_model, tiny_target, write_heads
from tests.support.engine.runs import run
from workers.engine import Completion, EngineConfig, EngineCore, Request, SamplingParams, SpeculationConfig
from workers.engine.api.errors import InvalidConfig, UnsupportedModel
from workers.engine.api.tree_shape import RankPath, TreeShape
from workers.engine.measure.calibrate_medusa import calibrate_medusa, rank_tuples, step_seconds
from workers.engine.models.layers.precision import Precision
from workers.engine.speculators.medusa.heads import MedusaHeads
from workers.engine.speculators.medusa.tree import calibrate_tree, fastest_size, read_tree, write_tree
from workers.engine.speculators.shared.checkpoint import open_draft

PROMPTS = [[40 + 3 * i, 50 + i, 60] for i in range(12)]


def accepted(tree: Iterable[RankPath], ranks: tuple[int, ...]) -> int:
    paths = set(tree)
    return max((depth for depth in range(len(ranks) + 1) if ranks[:depth] in paths), default=0)


def trees(paths: list[RankPath], size: int) -> Iterable[tuple[RankPath, ...]]:
    for chosen in product((False, True), repeat=len(paths)):
        tree = tuple(path for path, taken in zip(paths, chosen, strict=True) if taken)
        if len(tree) == size and all(len(path) == 1 or path[:-1] in tree for path in tree):
            yield tree


@pytest.mark.parametrize("seed", range(5))
def test_no_tree_of_the_size_accepts_more(seed: int) -> None:
    rng = random.Random(seed)
    tuples = [tuple(rng.choice((0, 0, 1, 2)) for _ in range(rng.randrange(3))) for _ in range(40)]
    everything = sorted({ranks[:depth] for ranks in tuples for depth in range(1, len(ranks) + 1)})
    for size in range(1, 6):
        tree = calibrate_tree([tuples], size)
        gain = sum(accepted(tree.paths, ranks) for ranks in tuples)
        assert gain == max(sum(accepted(other, ranks) for ranks in tuples) for other in trees(everything, size))
        assert sum(tree.frequencies) == pytest.approx(gain / len(tuples))
        TreeShape(paths=tree.paths)


def test_what_goes_together_is_seen() -> None:
    """Each head is right half of the time: always both or neither, which products of accuracies cannot tell."""
    tree = calibrate_tree([[(0, 0)] * 5 + [(1, 1)] * 5], 4)
    assert set(tree.paths) == {(0,), (1,), (0, 0), (1, 1)}
    assert tree.frequencies == (0.5,) * 4


def test_a_step_begins_behind_what_the_last_one_missed() -> None:
    """Three positions of four are easy; every other step begins at the fourth, which is not."""
    hard, easy = (5,), (0, 0)
    tree = calibrate_tree([[easy, easy, easy, hard] * 10], 2)
    assert tree.paths == ((0,), (0, 0))
    assert 1 + sum(tree.frequencies) == 2.5
    assert tree.expected_tokens == 41 / 21, "the step of the prompt, ten of three tokens, ten of one"


def test_the_end_is_not_drafted() -> None:
    tree = calibrate_tree([[(0, 0, 0)] * 3, [], [(0,)]], 3)
    assert tree.expected_tokens == (4 + 1 + 2) / (2 + 1 + 2)


def test_the_size_pays_for_its_time() -> None:
    tree = calibrate_tree([[ranks] * 3 for ranks in [(0, 0)] * 6 + [(1,)] * 3 + [(2,)]], 8)
    assert tree.frequencies == (0.6, 0.6, 0.3, 0.1)
    assert [round(40 / tree.cut(size).expected_tokens) for size in range(1, 5)] == [34, 28, 25, 24]
    assert len(fastest_size(tree, dict.fromkeys(range(1, 9), 1.0)).paths) == 4, "verification is free: take all"
    assert len(fastest_size(tree, {1: 1.0, 2: 1.1, 3: 1.4, 4: 2.0}).paths) == 2
    assert fastest_size(tree, {}) == tree


def test_ranks_are_those_of_the_heads(tmp_path: Path) -> None:
    tensors = random_heads(3)
    files = open_draft(write_heads(tmp_path, tensors))
    heads = MedusaHeads.load(files, 48, 320, Precision())
    hidden = torch.randn(6, 48, generator=torch.Generator().manual_seed(0))
    following = [medusa_logits(tensors, 0, 1, hidden)[row].topk(row + 1).indices[-1].item() for row in range(6)]
    found = rank_tuples(heads, hidden, following)
    assert [ranks[:1] for ranks in found] == [(row,) for row in range(6)]
    for row, ranks in enumerate(found):
        for head, rank in enumerate(ranks):
            logits = medusa_logits(tensors, head, 1, hidden[row])
            assert rank == int((logits > logits[following[row + head]]).sum())
        lost = row + len(ranks)
        if len(ranks) < 3 and lost < 6:
            logits = medusa_logits(tensors, len(ranks), 1, hidden[row])
            assert int((logits > logits[following[lost]]).sum()) >= 16


def generate(draft: str, max_tokens: int = 32, context: float = 0.1, **options: object) -> dict[object, Completion]:
    speculation = SpeculationConfig(method="medusa", draft=draft, policy="fixed", **options)  # type: ignore[arg-type]
    core = EngineCore(EngineConfig(target="tiny", kv_blocks=200, speculation=speculation), model=tiny_target(context))
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return run(core, [Request(i, prompt, params) for i, prompt in enumerate(PROMPTS)])


def tokens_per_step(done: dict[object, Completion]) -> float:
    return sum(c.stats.emitted for c in done.values()) / sum(c.stats.steps for c in done.values())


def test_a_calibrated_tree_is_found_stored_and_used(tmp_path: Path) -> None:
    draft = write_heads(tmp_path, chained_heads(tiny_model()))
    config = EngineConfig(target="tiny", kv_blocks=200, speculation=SpeculationConfig(method="medusa", draft=draft))
    tree = calibrate_medusa(
        config, PROMPTS, max_tokens=32, max_nodes=12, seconds={4: 1.0, 12: 1.01}, model=tiny_target()
    )
    assert tree.positions > 100
    assert read_tree(tmp_path) == TreeShape(paths=tree.paths)
    calibrated, chain = generate(draft), generate(draft, tree_width=1)
    assert {key: c.token_ids for key, c in calibrated.items()} == {key: c.token_ids for key, c in chain.items()}
    assert tokens_per_step(calibrated) > tokens_per_step(chain)
    assert tree.expected_tokens == pytest.approx(tokens_per_step(calibrated), rel=1e-9)
    assert max(c.stats.drafted / c.stats.steps for c in calibrated.values()) <= len(tree.paths)


@pytest.mark.parametrize(
    ("max_nodes", "max_tokens", "context"), [(30, 2, 0.1), (1, 40, 0.1), (5, 17, 0.4), (30, 60, 0.1)]
)
def test_a_run_yields_what_was_expected(max_nodes: int, max_tokens: int, context: float, tmp_path: Path) -> None:
    draft = write_heads(tmp_path, chained_heads(tiny_model(), 5))
    speculation = SpeculationConfig(method="medusa", draft=draft)
    config = EngineConfig(target="tiny", kv_blocks=200, speculation=speculation)
    target = tiny_target(context=context)
    tree = calibrate_medusa(config, PROMPTS, max_tokens=max_tokens, max_nodes=max_nodes, seconds={}, model=target)
    done = generate(draft, max_tokens, context=context)
    assert tree.expected_tokens == pytest.approx(tokens_per_step(done), rel=1e-9)


def test_calibration_refuses_what_it_cannot_learn_from(tmp_path: Path) -> None:
    draft = write_heads(tmp_path, random_heads())
    config = EngineConfig(target="tiny", kv_blocks=50, speculation=SpeculationConfig(method="medusa", draft=draft))
    with pytest.raises(InvalidConfig, match="never right on these prompts, or there were none"):
        calibrate_medusa(config, [], model=tiny_target())
    with pytest.raises(InvalidConfig, match="prompt 1 of the calibration cannot run: the prompt has no tokens"):
        calibrate_medusa(config, [[1, 2], []], model=tiny_target())
    with pytest.raises(InvalidConfig, match="needs method medusa"):
        calibrate_medusa(EngineConfig(target="tiny"), PROMPTS, model=tiny_target())


def test_steps_are_timed_by_tree_size() -> None:
    seconds = step_seconds(tiny_target().executor, batch=2, max_nodes=12, repeats=1)
    assert list(seconds) == [4, 8, 12]
    assert all(value > 0 for value in seconds.values())


@pytest.mark.parametrize("content", ['{"paths": []}', '{"paths": [[0, 1]]}', "[]", "{", '{"paths": [["x"]]}'])
def test_a_broken_tree_file_is_refused(content: str, tmp_path: Path) -> None:
    assert read_tree(tmp_path) is None
    (tmp_path / "medusa_tree.json").write_text(content)
    with pytest.raises(UnsupportedModel, match=r"medusa_tree\.json"):
        read_tree(tmp_path)


def test_trees_survive_the_file(tmp_path: Path) -> None:
    tree = calibrate_tree([[(0, 1, 2), (0,), (3, 0)]], 10)
    write_tree(tmp_path, tree)
    assert read_tree(tmp_path) == TreeShape(paths=tree.paths)
