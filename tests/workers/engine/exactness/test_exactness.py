"""Promise 1: speculation never changes a token, whatever the method, batch, pool, chunking or restart."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest

from tests.support.engine.runs import TARGET, answers, engine, mixed_requests, oracle, run
from tests.support.engine.worlds import WORLDS, World
from workers.engine import Completion, EngineConfig, EngineCore, Request, SamplingParams, SpeculationConfig
from workers.engine.api.config import METHODS

PATHS = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (0, 0, 0, 0))
SHAPES: dict[str, dict[str, Any]] = {
    "own": {},
    "chain": {"tree_width": 1},
    "beam": {"tree_width": 3},
    "paths": {"tree_paths": PATHS},
    "dynamic": {"tree_width": 3, "tree_nodes": 7},
}
OWN, TREES = ("own",), ("chain", "beam", "paths", "dynamic")


class Way:
    """A way of speculating: in which world, which shapes its drafts may have, with which of them it has to answer all
    requests and not only the first ones, and whether its drafts are meant to be right at times."""

    def __init__(
        self, world: str, method: str, *, shapes: Seq[str] = TREES, all_of: str = "", good: bool = True, **options: Any
    ) -> None:
        self.world, self.shapes, self.all_of, self.good = world, shapes, all_of, good
        self.method = method
        self._options = {"policy": "fixed", **options} if method != "none" else options

    def speculation(self, shape: str) -> SpeculationConfig:
        return SpeculationConfig(method=self.method, **self._options, **SHAPES[shape])


WAYS = {
    "none": Way("scripted", "none", shapes=OWN, all_of="own", good=False),
    "ngram": Way("repeating", "ngram", shapes=OWN, all_of="own", ngram_min=1, max_draft_tokens=6),
    "ngram, threshold": Way("repeating", "ngram", shapes=OWN, ngram_min=1, policy="threshold", good=False),
    "suffix": Way("repeating", "suffix", shapes=OWN, all_of="own", max_draft_tokens=8),
    "draft_model": Way("scripted", "draft_model", draft="small", all_of="dynamic"),
    "draft_model, threshold": Way("scripted", "draft_model", shapes=("beam",), draft="small", policy="threshold"),
    "draft_model, auto": Way(
        "scripted", "draft_model", shapes=("chain", "dynamic"), draft="small", policy="auto", good=False
    ),
    "draft_model, the target": Way("scripted", "draft_model", shapes=("chain", "paths"), draft="target"),
    "draft_model, useless": Way("scripted", "draft_model", draft="scripted:seed=9", shapes=("beam",), good=False),
    "draft_model, mapped": Way("scripted", "draft_model", draft="other ids", vocabulary="mapped", all_of="paths"),
    "draft_model, text": Way("scripted", "draft_model", shapes=OWN, draft="other ids", vocabulary="text"),
    "draft_model, int8": Way("tiny", "draft_model", draft="target", draft_dtype="int8"),
    "mapped, bpe": Way("recital", "draft_model", draft="bpe", vocabulary="mapped"),
    "mapped, sentencepiece": Way("recital", "draft_model", draft="sentencepiece", vocabulary="mapped"),
    "text, bpe": Way("recital", "draft_model", shapes=OWN, draft="bpe", vocabulary="text"),
    "text, sentencepiece": Way("recital", "draft_model", shapes=OWN, draft="sentencepiece", vocabulary="text"),
    "self, skip": Way("scripted", "self", skip=("attn.0", "mlp.0"), all_of="beam"),
    "self, real layers": Way("tiny", "self", skip=("attn.1", "mlp.2")),
    "self, exit": Way("tiny", "self", exit_layer=1),
    "medusa": Way("tiny", "medusa", draft="heads", all_of="paths"),
    "medusa, calibrated": Way("tiny", "medusa", shapes=OWN, draft="calibrated heads"),
    "medusa, threshold": Way("tiny", "medusa", shapes=("dynamic",), draft="heads", policy="threshold"),
    "medusa, useless": Way("tiny", "medusa", shapes=("beam",), draft="random heads", good=False),
    "medusa, int8": Way("tiny", "medusa", shapes=("dynamic",), draft="heads", draft_dtype="int8"),
    "eagle1": Way("tiny", "eagle", draft="eagle1", all_of="dynamic"),
    "eagle1, int8": Way("tiny", "eagle", shapes=("dynamic",), draft="eagle1", draft_dtype="int8"),
    "eagle3": Way("tiny", "eagle", draft="eagle3"),
    "eagle3, fewer tokens": Way("tiny", "eagle", shapes=("chain", "dynamic"), draft="eagle3, fewer tokens"),
}
"""A new speculator is a line here."""
FEW = 24
"""Requests for the shapes that do not answer all of them: every sampling feature is among these as well."""

SETTINGS: dict[str, dict[str, Any]] = {
    "batch 1": {"max_batch": 1},
    "batch 4": {"max_batch": 4, "max_step_tokens": 16, "prefix_reuse": False, "block_size": 1, "kv_blocks": 4800},
    "batch 32": {"max_batch": 32},
    "preempting": {"max_batch": 32, "kv_blocks": 40, "block_size": 4},
}
PAIRS = [("batch 1", "preempting"), ("batch 4", "batch 32")]
SHAPED = [(name, shape) for name, way in WAYS.items() for shape in way.shapes]
CASES = [
    (name, shape, setting)
    for place, (name, shape) in enumerate(SHAPED)
    for setting in (SETTINGS if shape == WAYS[name].all_of else PAIRS[place % len(PAIRS)])
]
"""What answers all requests does so in every setting. The others take turns: two settings each."""


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, World]:
    return {name: make(tmp_path_factory.mktemp(name)) for name, make in WORLDS.items()}


def test_every_method_stands_in_the_table() -> None:
    assert {way.method for way in WAYS.values()} == set(METHODS)
    assert {way.method for way in WAYS.values() if way.all_of} == set(METHODS), "and answers all requests at least once"
    assert {(name, setting) for name, _, setting in CASES if len(WAYS[name].shapes) > 1} == {
        (name, setting) for name, way in WAYS.items() if len(way.shapes) > 1 for setting in SETTINGS
    }, "and what has several shapes is seen in every setting"


@pytest.mark.parametrize(("name", "shape", "setting"), CASES, ids=["-".join(case) for case in CASES])
def test_same_tokens(name: str, shape: str, setting: str, worlds: dict[str, World]) -> None:
    way = WAYS[name]
    world = worlds[way.world]
    requests = world.requests if shape == way.all_of else world.requests[:FEW]
    core = world.core(way.speculation(shape), **SETTINGS[setting])
    done = run(core, requests)
    assert answers(done) == {request.id: world.truth[request.id] for request in requests}
    stats = [completion.stats for completion in done.values()]
    if way.good:
        assert sum(s.accepted for s in stats) > len(requests) / 2
    if setting == "preempting":
        assert core.batcher.num_preemptions > len(requests) / 10


REQUESTS = mixed_requests(200)


@pytest.fixture(scope="module")
def truth() -> dict[object, Completion]:
    return run(engine(max_batch=1, prefix_reuse=False), REQUESTS)


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
