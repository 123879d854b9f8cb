"""check_draft reports what happened: counts that agree with the runs, sizes, vocabularies, and rules that fail."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.drafts.weights import (
    HIDDEN,
    eagle3_tensors,
    random_heads,
    safeailab3,
    tiny_target,
    write_eagle,
    write_heads,
)
from tests.support.models.tiny import config_of, prompt, save
from workers.engine import EngineConfig, EngineCore, Request, SamplingParams, SpeculationConfig
from workers.engine.api.errors import InvalidConfig
from workers.engine.api.stats import AcceptanceStats
from workers.engine.measure.acceptance import AcceptanceCounts, rate_interval
from workers.engine.measure.check_draft import DraftReport, check_draft
from workers.engine.measure.speedup import expected_tokens
from workers.engine.models.executor import LoadedModel, ModelOutput
from workers.engine.models.loading.load import load_model
from workers.engine.state.batch import Batch
from workers.engine.state.kv_cache import KVCache

TARGET = "scripted:seed=3,order=2,eos_every=0,sharpness=2.0"
LOOPING = "scripted:seed=3,order=1,eos_every=0,sharpness=2.0"
"""Its texts run into loops, some sooner than others."""
PROMPTS = [[40, 41, 42], [50, 51], [60] * 9]
MANY = [[token, token + 1] for token in range(40, 100, 5)]
NGRAM = {"method": "ngram", "ngram_min": 1}
METHODS = [
    NGRAM,
    {"method": "suffix"},
    {"method": "self", "skip": ("mlp.0",)},
    {"method": "self", "skip": ("mlp.0",), "tree_width": 3, "tree_nodes": 5},
    {"method": "draft_model", "draft": "scripted:seed=3,order=1,sharpness=2.0"},
]


def check(
    target: str = TARGET,
    batch_sizes: tuple[int, ...] = (1, 4),
    *,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    params: SamplingParams | None = None,
    model: LoadedModel | None = None,
    **options: Any,
) -> DraftReport:
    speculation = SpeculationConfig(**{"max_draft_tokens": 3, **options})
    config = EngineConfig(target=target, speculation=speculation, block_size=4)
    return check_draft(config, prompts, batch_sizes, 24, params=params, repeats=1, model=model)


def test_the_target_as_its_own_draft_is_always_right() -> None:
    report = check(method="draft_model", draft="target")
    assert report.identical
    assert report.counts.acceptance == (1.0, 1.0, 1.0)
    assert report.counts.reached[0] >= report.counts.reached[2] > 0
    assert report.counts.mean_acceptance_length > 3
    assert [batch.batch for batch in report.batches] == [1, 4]
    assert {rule.name for rule in report.failed_rules} == {"speed"}
    for batch in report.batches:
        assert batch.plain_step > 0
        assert batch.measured_speedup > 0
        steps = 3 * batch.draft_pass + batch.verify_step
        assert batch.speed_ratio == pytest.approx(batch.plain_step / batch.draft_pass)
        assert batch.predicted_speedup <= 1.3 * expected_tokens((1.0,) * 3) * batch.plain_step / steps


@pytest.mark.parametrize("options", METHODS, ids=lambda options: options["method"])
def test_every_method_can_be_checked(options: dict[str, Any]) -> None:
    report = check(**options)
    assert report.identical
    assert report.method == options["method"]
    counts = report.counts
    for accepted, reached, rate, (low, high) in zip(
        counts.accepted, counts.reached, counts.acceptance, counts.intervals, strict=True
    ):
        assert 0 <= accepted <= reached
        assert 0 <= low <= rate <= high <= 1
    assert (report.draft_weight_bytes, report.draft_hidden_bytes_per_token) == (0, 0)


@pytest.mark.parametrize("options", METHODS, ids=lambda options: options["method"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_prompts_count_once_whatever_batch_sizes_are_timed(temperature: float, options: dict[str, Any]) -> None:
    params = SamplingParams(temperature=temperature, seed=5)
    sizes: tuple[tuple[int, ...], ...] = ((1,), (30, 2))
    reports = [check(LOOPING, batches, prompts=MANY, params=params, **options) for batches in sizes]
    counts = reports[0].counts
    assert reports[1].counts == counts
    assert (counts.prompts, counts.output_tokens) == (len(MANY), 24 * len(MANY))
    assert [batch.requests for report in reports for batch in report.batches] == [12, 36, 12]
    for batch in (*reports[0].batches, *reports[1].batches):
        assert batch.plain_steps >= 22
        # One that has learnt from all the answers before it, or from none of them, is another matter.
        if options["method"] != "suffix":
            assert batch.tokens_per_step == counts.mean_acceptance_length


def test_counts_are_those_of_a_job() -> None:
    options = SpeculationConfig(**{**NGRAM, "max_draft_tokens": 3, "policy": "fixed"})
    core = EngineCore(EngineConfig(LOOPING, speculation=options, kv_blocks=400))
    for index, token_ids in enumerate(MANY):
        core.add(Request(index, token_ids, SamplingParams(max_tokens=24)))
    while core.has_work:
        core.step()
    counts, totals = check(LOOPING, prompts=MANY, **NGRAM).counts, core.snapshot()
    assert (counts.steps, counts.drafted) == (totals.steps, totals.drafted)
    assert (sum(counts.accepted), counts.output_tokens) == (totals.accepted, totals.emitted)


def test_a_suffix_learns_from_no_answer_to_the_same_prompt() -> None:
    """Else a prompt that is timed after it was counted would find its own answer."""
    report = check(TARGET, (8, 8), prompts=MANY, method="suffix")
    assert [batch.tokens_per_step for batch in report.batches] == [report.counts.mean_acceptance_length] * 2


class _Clock:
    """Time passes in target passes alone, one unit each."""

    def __init__(self, model: LoadedModel) -> None:
        self.now = 0.0
        self._executor = model.executor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def forward(self, batch: Batch, cache: KVCache) -> ModelOutput:
        self.now += 1
        return self._executor.forward(batch, cache)


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_steps_without_a_draft_are_in_the_prediction(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(EngineConfig(LOOPING))
    clock: Any = _Clock(model)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    ticking = LoadedModel(clock, model.tokenizer, model.name, model.content_hash, model.report)
    options = {**NGRAM, "method": method} if method == "ngram" else {"method": method}
    report = check(LOOPING, (1, 4), prompts=MANY, model=ticking, **options)
    assert 0 < report.counts.tested < report.counts.steps / 2
    alone, batched = report.batches
    assert (alone.plain_step, alone.verify_step, alone.draft_pass) == (1, 1, 0)
    assert alone.predicted_speedup == alone.tokens_per_step == pytest.approx(alone.measured_speedup)
    assert batched.predicted_speedup == batched.tokens_per_step
    if method == "ngram":
        assert alone.predicted_speedup == report.counts.mean_acceptance_length
    assert report.counts.mean_acceptance_length == pytest.approx(1 + sum(report.counts.survival))


@pytest.mark.parametrize(
    ("counts", "interval"),
    [
        ([], (0.0, 1.0)),
        ([(0, 0)], (0.0, 1.0)),
        ([(3, 3)], (0.4385, 1.0)),
        ([(0, 10)], (0.0, 0.2775)),
        ([(5, 10)], (0.2366, 0.7634)),
        ([(81, 263)], (0.2553, 0.3662)),
        # Prompts that differ no more than chance would have it count by their trials,
        ([(5, 10)] * 10, (0.4038, 0.5962)),
        # those that are right or wrong throughout by their number: 10, less the one that the mean takes.
        ([(10, 10), (0, 10)] * 5, (0.2265, 0.7735)),
    ],
)
def test_intervals_of_rates(counts: list[tuple[int, int]], interval: tuple[float, float]) -> None:
    assert rate_interval(counts) == pytest.approx(interval, abs=1e-4)


def test_counts_add_up_over_prompts_that_reached_other_depths() -> None:
    stats = [
        AcceptanceStats(steps=2, drafted=4, accepted=3, reached_per_depth=[2, 2], accepted_per_depth=[2, 1]),
        AcceptanceStats(steps=5),
        AcceptanceStats(steps=1, drafted=1, accepted=0, reached_per_depth=[1]),
    ]
    counts = AcceptanceCounts.of(stats)
    assert (counts.reached, counts.accepted, counts.tested) == ((3, 2), (2, 1), 3)
    assert (counts.prompts, counts.steps, counts.output_tokens, counts.drafted) == (3, 8, 11, 5)
    assert counts.survival == (2 / 8, 1 / 8)


def test_a_rule_is_undecided_where_too_little_happened() -> None:
    few = check(method="draft_model", draft="target", prompts=[[40]], max_draft_tokens=12, batch_sizes=(1,))
    assert few.counts.acceptance[0] == 1.0
    assert [rule.name for rule in few.undecided_rules] == ["acceptance"]
    assert "acceptance" not in {rule.name for rule in few.failed_rules}
    assert few.undecided_rules[0].interval == few.counts.intervals[0]
    many = check(method="draft_model", draft="target", prompts=MANY, batch_sizes=(8,))
    assert not many.undecided_rules
    never = check("scripted:seed=3,eos_every=0", method="ngram", ngram_min=3, prompts=[[40]], batch_sizes=(1,))
    (rule,) = never.undecided_rules
    assert (rule.name, rule.measured, rule.interval) == ("acceptance", None, (0.0, 1.0))
    assert never.batches[0].tokens_per_step == 1


@pytest.mark.parametrize(("method", "features"), [("medusa", 1), ("eagle", 3)])
def test_features_that_a_draft_reads_are_counted_as_memory(method: str, features: int, tmp_path: Path) -> None:
    heads = write_heads(tmp_path / "medusa", random_heads())
    layer = write_eagle(tmp_path / "eagle", safeailab3(), eagle3_tensors())
    draft = {"medusa": heads, "eagle": layer}[method]
    config = EngineConfig("tiny", speculation=SpeculationConfig(method=method, draft=draft, max_draft_tokens=2))
    report = check_draft(config, [prompt(9, 1)], (1,), 12, repeats=1, model=tiny_target())
    assert report.draft_hidden_bytes_per_token == features * HIDDEN * 4
    assert (report.draft_kv_bytes_per_token > 0) == (method == "eagle")


def test_sizes_and_memory_of_a_draft_model(tmp_path: Any) -> None:
    target = save(tmp_path / "target", config_of("Llama"))
    small = save(tmp_path / "draft", config_of("Llama", num_hidden_layers=1), seed=3, shift=-4)
    speculation = SpeculationConfig(method="draft_model", draft=small, vocabulary="mapped")
    config = EngineConfig(target=target, speculation=speculation)
    prompts, params = [prompt(9, seed) for seed in range(8)], SamplingParams(temperature=1.0, seed=1)
    report = check_draft(config, prompts, (8,), 24, params=params, repeats=1)
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
        check_draft(EngineConfig(TARGET), PROMPTS, (1,), 8)
    with pytest.raises(InvalidConfig, match="batch 4: no step in which all decode"):
        check_draft(EngineConfig(TARGET, speculation=SpeculationConfig(method="ngram")), PROMPTS, (4,), 1)
    with pytest.raises(InvalidConfig, match="prompt 1 cannot be measured: the prompt has no tokens"):
        check(prompts=[[40], []], method="ngram")
