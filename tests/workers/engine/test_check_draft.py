"""check_draft reports what happened: counts that agree with the runs, sizes, vocabularies, and rules that fail."""

from __future__ import annotations

from typing import Any

import pytest

from tests.workers.engine.models.test_loading import save
from tests.workers.engine.models.tiny import config_of, prompt
from workers.engine import EngineConfig, SamplingParams, SpeculationConfig
from workers.engine.check_draft import DraftReport, check_draft
from workers.engine.errors import InvalidConfig
from workers.engine.speculators.speedup import expected_tokens

TARGET = "scripted:seed=3,order=2,eos_every=0,sharpness=2.0"
PROMPTS = [[40, 41, 42], [50, 51], [60] * 9]


def check(target: str = TARGET, batch_sizes: tuple[int, ...] = (1, 4), **options: Any) -> DraftReport:
    speculation = SpeculationConfig(**{"max_draft_tokens": 3, **options})
    config = EngineConfig(target=target, speculation=speculation, block_size=4)
    return check_draft(config, PROMPTS, batch_sizes, 24, repeats=1)


def test_the_target_as_its_own_draft_is_always_right() -> None:
    report = check(method="draft_model", draft="target")
    assert report.identical
    assert report.acceptance == (1.0, 1.0, 1.0)
    assert report.reached[0] >= report.reached[2] > 0
    assert report.mean_acceptance_length > 3
    assert [batch.batch for batch in report.batches] == [1, 4]
    assert {rule.name for rule in report.failed_rules} == {"speed"}
    for batch in report.batches:
        assert batch.plain_step > 0
        assert batch.measured_speedup > 0
        steps = 3 * batch.draft_pass + batch.verify_step
        assert batch.speed_ratio == pytest.approx(batch.plain_step / batch.draft_pass)
        assert batch.predicted_speedup <= 1.3 * expected_tokens((1.0,) * 3) * batch.plain_step / steps


@pytest.mark.parametrize(
    "options",
    [
        {"method": "ngram", "ngram_min": 1},
        {"method": "self", "skip": ("mlp.0",)},
        {"method": "self", "skip": ("mlp.0",), "tree_width": 3, "tree_nodes": 5},
        {"method": "draft_model", "draft": "scripted:seed=3,order=1,sharpness=2.0"},
    ],
    ids=lambda options: options["method"],
)
def test_every_method_can_be_checked(options: dict[str, Any]) -> None:
    report = check(**options)
    assert report.identical
    assert report.method == options["method"]
    assert all(0 <= a <= r for a, r in zip(report.accepted, report.reached, strict=True))
    assert report.draft_weight_bytes == 0


def test_sizes_and_memory_of_a_draft_model(tmp_path: Any) -> None:
    target = save(tmp_path / "target", config_of("Llama"))
    small = save(tmp_path / "draft", config_of("Llama", num_hidden_layers=1), seed=3, shift=-4)
    speculation = SpeculationConfig(method="draft_model", draft=small, vocabulary="mapped")
    config = EngineConfig(target=target, speculation=speculation)
    report = check_draft(config, [prompt(9, 1)], (2,), 12, params=SamplingParams(temperature=1.0, seed=1), repeats=1)
    assert report.identical
    assert report.vocabulary == "mapped"
    assert report.vocabulary_overlap == 1.0
    assert 0 < report.draft_weight_bytes < report.target_weight_bytes
    assert report.target_kv_bytes_per_token == 3 * report.draft_kv_bytes_per_token
    failed = {rule.name: rule for rule in report.failed_rules}
    assert {"acceptance", "size", "vocabulary"} <= set(failed)
    assert failed["size"].measured == report.draft_weight_bytes / report.target_weight_bytes


def test_there_must_be_something_to_compare() -> None:
    with pytest.raises(InvalidConfig, match="give a method, prompts and batches"):
        check(method="none")
    with pytest.raises(InvalidConfig, match="batch 4: no step in which all decode"):
        check_draft(EngineConfig(TARGET, speculation=SpeculationConfig(method="ngram")), PROMPTS, (4,), 1)
