"""Promise 1: speculation never changes a token, whatever the method, batch, pool, chunking or restart."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.workers.engine.helpers import TARGET, answers, engine, mixed_requests, oracle, run
from tests.workers.engine.speculators.drafts import (
    eagle3_tensors,
    random_heads,
    safeailab3,
    write_eagle,
    write_heads,
)
from workers.engine import Completion, EngineConfig, EngineCore, Request, SamplingParams, SpeculationConfig
from workers.engine.models.scripted import HIDDEN, Script

REQUESTS = mixed_requests(200)
VOCAB = Script.parse(TARGET).vocab

METHODS = {
    "none": SpeculationConfig(),
    "ngram": SpeculationConfig(method="ngram", max_draft_tokens=6, ngram_min=1, policy="fixed"),
    "suffix": SpeculationConfig(method="suffix", max_draft_tokens=8, policy="fixed"),
    "draft chain": SpeculationConfig(
        method="draft_model", draft="scripted:seed=3,order=1,sharpness=2.0", max_draft_tokens=4, policy="fixed"
    ),
    "draft tree": SpeculationConfig(
        method="draft_model",
        draft="scripted:seed=3,order=1,sharpness=2.0",
        max_draft_tokens=4,
        tree_width=3,
        policy="fixed",
    ),
    "self draft": SpeculationConfig(method="draft_model", draft="target", max_draft_tokens=5),
    "self draft tree": SpeculationConfig(method="draft_model", draft="target", max_draft_tokens=3, tree_width=2),
    "draft with other ids": SpeculationConfig(
        method="draft_model", draft="scripted:seed=3,order=1,sharpness=2.0,vocab=300", tree_width=2, policy="fixed"
    ),
    "draft through text": SpeculationConfig(
        method="draft_model", draft="scripted:seed=3,order=1,sharpness=2.0,vocab=300", vocabulary="text", policy="fixed"
    ),
    "self": SpeculationConfig(method="self", skip=("mlp.0",), max_draft_tokens=5, policy="fixed"),
    "self tree": SpeculationConfig(method="self", skip=("attn.0", "mlp.0"), tree_width=3, policy="fixed"),
    "self dynamic tree": SpeculationConfig(
        method="self", skip=("attn.0", "mlp.0"), tree_width=3, tree_nodes=4, policy="fixed"
    ),
    "medusa": SpeculationConfig(method="medusa", draft="heads", max_draft_tokens=2, tree_width=2, policy="fixed"),
    "eagle": SpeculationConfig(method="eagle", draft="layer", max_draft_tokens=2, tree_width=2, policy="fixed"),
    "threshold": SpeculationConfig(method="ngram", max_draft_tokens=8, ngram_min=1, policy="threshold"),
}

SETTINGS = {
    "batch 1": {"max_batch": 1},
    "batch 4": {"max_batch": 4, "max_step_tokens": 16},
    "batch 32": {"max_batch": 32},
    "preempting": {"max_batch": 32, "kv_blocks": 40, "block_size": 4},
    "no reuse": {"max_batch": 8, "prefix_reuse": False, "block_size": 1},
}


@pytest.fixture(scope="module")
def truth() -> dict[object, Completion]:
    return run(engine(max_batch=1, prefix_reuse=False), REQUESTS)


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, str]:
    """Heads and a draft layer for the scripted target's hidden states, with random weights."""
    folder = tmp_path_factory.mktemp("drafts")
    layer = safeailab3(
        hidden_size=24, head_dim=8, target_hidden_size=HIDDEN, draft_vocab_size=VOCAB,
        eagle_aux_hidden_state_layer_ids=[0],
    )  # fmt: skip
    tensors = eagle3_tensors(
        features=1, hidden=24, head_dim=8, feature_size=HIDDEN, draft_vocab=VOCAB, target_vocab=VOCAB
    )
    return {
        "heads": write_heads(folder / "heads", random_heads(3, hidden=HIDDEN, vocab=VOCAB)),
        "layer": write_eagle(folder / "layer", layer, tensors),
    }


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("method", METHODS)
def test_same_tokens_by_every_method(
    method: str, setting: str, truth: dict[object, Completion], drafts: dict[str | None, str]
) -> None:
    speculation = METHODS[method]
    speculation = replace(speculation, draft=drafts.get(speculation.draft, speculation.draft))
    core = engine(speculation=speculation, **SETTINGS[setting])
    done = run(core, REQUESTS)
    assert answers(done) == answers(truth)
    if setting == "preempting":
        assert core.batcher.num_preemptions > 20


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("accuracy", [0.0, 0.5, 0.9, 1.0])
def test_same_tokens_whatever_is_proposed(accuracy: float, width: int, truth: dict[object, Completion]) -> None:
    config = EngineConfig(
        target=TARGET,
        max_batch=16,
        kv_blocks=60,
        block_size=4,
        speculation=SpeculationConfig(method="ngram", policy="fixed"),
    )
    core = EngineCore(config, make=lambda context: {"none": oracle(truth, accuracy=accuracy, width=width)})
    assert answers(run(core, REQUESTS)) == answers(truth)


def test_the_answer_is_a_function_of_the_request_alone() -> None:
    """Samples of one prompt differ; the same seed and sample agree wherever they run."""
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=5, ignore_eos=True)
    requests = [Request((row, sample), b"hello", params, sample) for row in range(3) for sample in range(4)]
    done = run(engine(), requests)
    for sample in range(4):
        assert len({done[row, sample].token_ids for row in range(3)}) == 1
    assert len({done[0, sample].token_ids for sample in range(4)}) == 4


def test_every_request_may_name_its_method(truth: dict[object, Completion]) -> None:
    """One batch, four methods: same tokens, and each completion says which method it had."""
    speculation = SpeculationConfig(
        method="ngram",
        row_methods=("none", "suffix", "draft_model"),
        draft="target",
        ngram_min=1,
        tree_width=2,
        policy="fixed",
    )
    methods = (None, *speculation.methods)
    mixed = [replace(request, method=methods[i % len(methods)]) for i, request in enumerate(REQUESTS)]
    done = run(engine(speculation=speculation, max_batch=16), mixed)
    assert answers(done) == answers(truth)
    for request in mixed:
        assert done[request.id].method == (request.method or "ngram")
    assert all(done[r.id].stats.drafted == 0 for r in mixed if r.method == "none")
    unknown = engine().add(replace(REQUESTS[0], method="ngram"))
    assert unknown is not None
    assert unknown.error_code == "invalid_params"
