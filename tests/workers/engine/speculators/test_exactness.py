"""Promise 1 on a real architecture: drafts from hidden states change no token, whatever their tree and the pool."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.workers.engine.helpers import answers, mixed_requests, run
from tests.workers.engine.models.tiny import VOCAB
from tests.workers.engine.speculators.drafts import (
    LAYER,
    chained_heads,
    eagle1_tensors,
    eagle3_tensors,
    library3,
    random_heads,
    safeailab3,
    tiny_model,
    tiny_target,
    write_eagle,
    write_heads,
)
from tests.workers.engine.speculators.test_forward import NORMS
from workers.engine import Completion, EngineConfig, EngineCore, SpeculationConfig
from workers.engine.models.executor import LoadedModel
from workers.engine.speculators.medusa_tree import calibrate_tree, write_tree

REQUESTS = mixed_requests(14, max_tokens=24)
PATHS = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (0, 0, 0, 0))


def medusa(draft: str = "medusa", **options: Any) -> SpeculationConfig:
    return SpeculationConfig(**{"method": "medusa", "draft": draft, "policy": "fixed", **options})


def eagle(draft: str = "eagle1", **options: Any) -> SpeculationConfig:
    return SpeculationConfig(**{"method": "eagle", "draft": draft, "policy": "fixed", **options})


METHODS = {
    "medusa, calibrated tree": medusa("medusa with tree"),
    "medusa, chain": medusa(tree_width=1),
    "medusa, dynamic tree": medusa(tree_width=3, tree_nodes=8),
    "medusa, random heads": medusa("random medusa", max_draft_tokens=2, tree_width=2, policy="threshold"),
    "medusa, int8": medusa(draft_dtype="int8"),
    "eagle1, dynamic tree": eagle(),
    "eagle1, chain": eagle(tree_width=1, max_draft_tokens=5),
    "eagle1, beam": eagle(tree_width=3),
    "eagle1, fixed paths": eagle(tree_paths=PATHS),
    "eagle1, threshold": eagle(policy="threshold"),
    "eagle3, dynamic tree": eagle("eagle3", max_draft_tokens=3, tree_width=3, tree_nodes=7),
    "eagle3, library": eagle("library", tree_width=1, max_draft_tokens=3),
    "eagle1, int8": eagle(draft_dtype="int8"),
    "eagle3, int8": eagle("eagle3", max_draft_tokens=3, draft_dtype="int8"),
}

SETTINGS = {
    "batch 1": {"max_batch": 1},
    "batch 4": {"max_batch": 4, "max_step_tokens": 16, "prefix_reuse": False},
    "batch 32": {"max_batch": 32},
    "preempting": {"max_batch": 32, "kv_blocks": 26, "block_size": 4},
}


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return tiny_target()


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("drafts")
    heads = chained_heads(tiny_model())
    calibrated = write_heads(folder / "calibrated", heads)
    write_tree(folder / "calibrated", calibrate_tree([[(0, 0, 0), (0, 1), (0, 0, 2), (1, 0), (3,), ()] * 3], 8))
    library = library3(norm_before_residual=True, fc_norm=True, eagle_aux_hidden_state_layer_ids=[2, 0, 1])
    return {
        "medusa": write_heads(folder / "medusa", heads),
        "medusa with tree": calibrated,
        "random medusa": write_heads(folder / "random", random_heads(2, 2), 2),
        "eagle1": write_eagle(folder / "eagle1", LAYER, eagle1_tensors(near=0.02)),
        "eagle3": write_eagle(
            folder / "eagle3", safeailab3(draft_vocab_size=200), eagle3_tensors(draft_vocab=200, lm_head=True)
        ),
        "library": write_eagle(folder / "library", library, eagle3_tensors("layers.0", extra=NORMS)),
    }


def engine(target: LoadedModel, speculation: SpeculationConfig, drafts: dict[str, str], **options: Any) -> EngineCore:
    if speculation.draft:
        speculation = replace(speculation, draft=drafts[speculation.draft])
    config = EngineConfig(**{"target": "tiny", "kv_blocks": 600, "speculation": speculation, **options})
    return EngineCore(config, model=target)


@pytest.fixture(scope="module")
def truth(target: LoadedModel) -> dict[object, Completion]:
    return run(engine(target, SpeculationConfig(), {}, max_batch=1, prefix_reuse=False), REQUESTS)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("method", METHODS)
def test_same_tokens_by_every_method(
    method: str, setting: str, target: LoadedModel, drafts: dict[str, str], truth: dict[object, Completion]
) -> None:
    core = engine(target, METHODS[method], drafts, **SETTINGS[setting])
    done = run(core, REQUESTS)
    assert answers(done) == answers(truth)
    stats = [completion.stats for completion in done.values()]
    assert sum(s.drafted for s in stats) > 20
    assert sum(s.accepted for s in stats) > (0 if "random" in method or "eagle3" in method else 20)
    if setting == "preempting":
        assert core.batcher.num_preemptions > 0


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
