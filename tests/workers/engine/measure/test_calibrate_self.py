"""The search for a skip set: what it measures is what happens, what it finds is about the best there is."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.drafts.weights import tiny_model
from tests.support.engine.runs import run
from tests.support.models.tiny import VOCAB, prompt
from workers.engine import EngineConfig, EngineCore, Request, SamplingParams, SpeculationConfig
from workers.engine.api.errors import InvalidConfig
from workers.engine.measure.calibrate_self import SelfCalibration, SublayerCosts, calibrate_self, measure_costs
from workers.engine.measure.skip_search import Judged, SkipSearch
from workers.engine.measure.speedup import best_length, expected_tokens
from workers.engine.models.executor import LoadedModel
from workers.engine.models.loading.pretrained import build_executor
from workers.engine.models.skipping import NOTHING, SkipSet
from workers.engine.speculators.self.skip_file import SkipFile
from workers.engine.text.tokenizer import ByteTokenizer

COSTS = SublayerCosts(attention=0.08, mlp=0.12, rest=0.4, verify=(1.0, 1.05, 1.1, 1.15, 1.2))
PROMPTS = [prompt(length, length) for length in (5, 17, 30, 12)]
CONFIG = EngineConfig("tiny", speculation=SpeculationConfig(method="self", max_draft_tokens=8))
NAMES = tuple(f"{kind}.{layer}" for kind in ("attn", "mlp") for layer in range(3))


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    """One whose second MLP decides more than all the rest."""
    model = tiny_model(0.05)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(30.0)
    return LoadedModel(build_executor(model, "numba", "tiny", 256), ByteTokenizer(VOCAB), "tiny", "0")


def calibrate(target: LoadedModel, **options: Any) -> SelfCalibration:
    return calibrate_self(CONFIG, PROMPTS, model=target, **{"answer_tokens": 24, "costs": COSTS, **options})


def test_it_finds_a_set_that_promises_a_speedup(target: LoadedModel, tmp_path: Path) -> None:
    seen: list[float] = []
    result = calibrate(target, progress=lambda count, best: seen.append(best))
    assert result.found.predicted_speedup > 1.05
    assert len(result.found.skip) >= 2
    assert "mlp.1" not in result.found.skip
    assert seen == sorted(seen)
    assert len(seen) == result.candidates
    assert seen[-1] == result.found.predicted_speedup
    assert calibrate(target) == result, "the same in every run"
    assert SkipFile.read(result.found.write(tmp_path / "deep" / "skip.json")) == result.found
    result.found.check(target)


def test_measured_acceptance_is_that_of_first_drafted_tokens(target: LoadedModel) -> None:
    """Greedy: the share of positions that agree is what an engine that drafts one token counts."""
    result = calibrate(target, temperature=0.0, max_positions=10_000)
    speculation = SpeculationConfig(method="self", skip=result.found.skip, max_draft_tokens=1, policy="fixed")
    # With a token more than the answer, the last of its positions is drafted too.
    params = SamplingParams(max_tokens=25, temperature=0.0)
    core = EngineCore(EngineConfig(target="tiny", speculation=speculation, kv_blocks=100), model=target)
    done = run(core, [Request(index, one, params) for index, one in enumerate(PROMPTS)])
    plain = EngineCore(EngineConfig(target="tiny", kv_blocks=100), model=target)
    truth = run(plain, [Request(index, one, params) for index, one in enumerate(PROMPTS)])
    assert [done[i].token_ids for i in done] == [truth[i].token_ids for i in done]
    reached, accepted = (
        sum(getattr(c.stats, name)[0] for c in done.values()) for name in ("reached_per_depth", "accepted_per_depth")
    )
    assert reached > 20
    assert abs(accepted / reached - result.found.acceptance) < 0.12


def test_nothing_skipped_is_accepted_always(target: LoadedModel) -> None:
    result = calibrate(target, costs=SublayerCosts(0.0, 0.0, 1.0, (1.0, 1.0)), max_candidates=6)
    assert result.candidates == 6
    assert result.found.acceptance <= 1.0
    with pytest.raises(InvalidConfig, match="1 prompts gave 1 positions"):
        calibrate_self(CONFIG, [[1, 2, 3]], model=target, answer_tokens=1, costs=COSTS)


@pytest.mark.parametrize("seed", range(6))
def test_the_search_comes_close_to_trying_everything(seed: int) -> None:
    """Sublayers that hurt by different amounts, some of them together more than apart."""

    def judge(skip: SkipSet) -> Judged:
        acceptance = 1.0
        for index, name in enumerate(NAMES):
            if name in skip.names:
                acceptance *= 1.0 - 0.04 * ((index * 7 + seed * 5) % 6)
        if {NAMES[seed % 6], NAMES[(seed + 1) % 6]} <= set(skip.names):
            acceptance *= 0.7
        cost = COSTS.of(skip, 3)
        return Judged(skip, acceptance, cost, *best_length(acceptance, cost, COSTS.verify))

    sets = [SkipSet.parse(names, 3) for size in range(1, 7) for names in combinations(NAMES, size)]
    best = max(judge(skip).speedup for skip in sets)
    search = SkipSearch(judge, 3, 40)
    assert search.run().speedup > 0.97 * best
    assert len(search.judged) <= 40 < len(sets)


def test_costs_add_up(target: LoadedModel) -> None:
    costs = measure_costs(target, 2, 3)
    assert len(costs.verify) == 4
    assert list(costs.verify) == sorted(costs.verify)
    assert costs.of(NOTHING, 3) == pytest.approx(max(1.0, 3 * (costs.attention + costs.mlp)))
    assert costs.of(SkipSet.leave_at(1, 3), 3) <= costs.of(NOTHING, 3)


def test_the_formulas() -> None:
    """Table of geometric acceptance: E(0.8, 5) = 3.689; at c = 0.1 and free checks that is a speedup of 2.46."""
    assert expected_tokens([0.8] * 5) == pytest.approx((1 - 0.8**6) / 0.2)
    assert expected_tokens([]) == 1.0
    assert best_length(0.8, 0.1, [1.0] * 11) == (6, pytest.approx(3.951424 / 1.6))
    assert best_length(0.5, 0.2, [1.0] * 11)[0] == 1
    assert best_length(0.5, 0.6, [1.0] * 3)[1] < 1.0
