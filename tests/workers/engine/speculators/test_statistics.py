"""A drafter that is always right is always accepted, and the counts say so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.drafts.weights import LAYER, eagle1_tensors, random_heads, tiny_target, write_eagle, write_heads
from tests.support.engine.runs import mixed_requests, run
from workers.engine import Completion, EngineConfig, EngineCore, Request, SamplingParams, SpeculationConfig


def finish(method: str, draft: str, context: float, *, greedy: bool = True, **options: Any) -> list[Completion]:
    speculation = SpeculationConfig(method=method, draft=draft, policy="fixed", max_draft_tokens=4, **options)
    core = EngineCore(
        EngineConfig(target="tiny", kv_blocks=300, speculation=speculation), model=tiny_target(context=context)
    )
    requests = [
        Request(r.id, r.prompt_token_ids, SamplingParams(
            max_tokens=21, temperature=r.params.temperature, top_p=r.params.top_p, seed=r.params.seed, ignore_eos=True
        ))
        for r in mixed_requests(12)
        if greedy or r.params.temperature > 0
    ]  # fmt: skip
    return list(run(core, requests).values())


@pytest.mark.parametrize("options", [{"tree_width": 1}, {"tree_width": 2}, {}], ids=["chain", "beam", "dynamic"])
def test_a_perfect_draft_layer_is_accepted_whole(options: dict[str, Any], tmp_path: Path) -> None:
    """The target's layers add nothing, and the draft's pass the embedding on: the feature to come, exactly.

    One plain step, since the prompt's features are not there yet, and then 5 tokens a step. In a tree that holds for
    sampled requests: a greedy one's candidates compete by their joint probability, where the greedy path may lose.
    """
    draft = write_eagle(tmp_path, LAYER, eagle1_tensors(near=0.0))
    for completion in finish("eagle", draft, 0.0, greedy=options == {"tree_width": 1}, **options):
        stats = completion.stats
        assert (stats.steps, stats.accepted, stats.emitted) == (5, 16, 21)
        assert stats.histogram == [1, 0, 0, 0, 4]
        assert stats.reached_per_depth == stats.accepted_per_depth == [4, 4, 4, 4]
        if options == {"tree_width": 1}:
            assert stats.drafted == stats.accepted


def test_random_heads_are_seldom_right(tmp_path: Path) -> None:
    done = finish("medusa", write_heads(tmp_path, random_heads()), 0.1, tree_width=2)
    drafted, accepted = (sum(getattr(c.stats, name) for c in done) for name in ("drafted", "accepted"))
    assert 0 <= accepted < 0.1 * drafted
    for completion in done:
        stats = completion.stats
        assert stats.emitted == stats.steps + stats.accepted == 21
        assert sum(stats.histogram) == stats.steps
        assert sum(stats.reached_per_depth) >= stats.accepted
