"""Drafts from hidden states beside other rows, and under the other rules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.drafts.weights import (
    LAYER,
    chained_heads,
    eagle1_tensors,
    tiny_model,
    tiny_target,
    write_eagle,
    write_heads,
)
from tests.support.engine.runs import answers, mixed_requests, run
from tests.support.models.tiny import VOCAB
from workers.engine import Completion, EngineConfig, EngineCore, SpeculationConfig
from workers.engine.models.executor import LoadedModel

REQUESTS = mixed_requests(14, max_tokens=24)


def medusa(draft: str = "medusa", **options: Any) -> SpeculationConfig:
    return SpeculationConfig(**{"method": "medusa", "draft": draft, "policy": "fixed", **options})


def eagle(draft: str = "eagle1", **options: Any) -> SpeculationConfig:
    return SpeculationConfig(**{"method": "eagle", "draft": draft, "policy": "fixed", **options})


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return tiny_target()


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("drafts")
    return {
        "medusa": write_heads(folder / "medusa", chained_heads(tiny_model())),
        "eagle1": write_eagle(folder / "eagle1", LAYER, eagle1_tensors(near=0.02)),
    }


def engine(target: LoadedModel, speculation: SpeculationConfig, drafts: dict[str, str], **options: Any) -> EngineCore:
    if speculation.draft:
        speculation = replace(speculation, draft=drafts[speculation.draft])
    config = EngineConfig(**{"target": "tiny", "kv_blocks": 600, "speculation": speculation, **options})
    return EngineCore(config, model=target)


@pytest.fixture(scope="module")
def truth(target: LoadedModel) -> dict[object, Completion]:
    return run(engine(target, SpeculationConfig(), {}, max_batch=1, prefix_reuse=False), REQUESTS)


def test_one_batch_with_and_without(
    target: LoadedModel, drafts: dict[str, str], truth: dict[object, Completion]
) -> None:
    """Rows choose their method: features are kept for all, and read for some."""
    speculation = eagle(row_methods=("none", "ngram"), ngram_min=1)
    requests = [replace(r, method=(None, "none", "ngram")[i % 3]) for i, r in enumerate(REQUESTS)]
    done = run(engine(target, speculation, drafts, kv_blocks=60, block_size=4), requests)
    assert answers(done) == answers(truth)
    assert {done[r.id].method for r in requests} == {"eagle", "none", "ngram"}


@pytest.mark.parametrize("verify", ["rejection", "block", "typical"])
@pytest.mark.parametrize("make", [medusa, eagle])
def test_other_rules_count_correctly(make: Any, verify: str, target: LoadedModel, drafts: dict[str, str]) -> None:
    done = run(engine(target, make(verify=verify), drafts, kv_blocks=60, block_size=4), REQUESTS)
    for completion in done.values():
        stats = completion.stats
        assert stats.emitted == len(completion.token_ids)
        assert stats.accepted + stats.trimmed <= stats.drafted
        assert max(completion.token_ids) < VOCAB
    assert sum(completion.stats.accepted for completion in done.values()) > 20
