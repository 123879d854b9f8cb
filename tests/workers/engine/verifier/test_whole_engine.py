"""Every rule through the whole engine: scripted models, the law of the outputs, and what the counts must be."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from tests.support.engine.counts import reconcile
from tests.support.engine.runs import TARGET, answers, engine, mixed_requests, run
from tests.support.engine.trees import tree_of
from tests.support.verifier.gtest import ALPHA, p_value
from workers.engine import EngineConfig, EngineCore, Request, SamplingParams, SpeculationConfig
from workers.engine.sampler import RowContext, distributions
from workers.engine.speculators.fixed import FixedSpeculator
from workers.engine.state.batch import Batch, Feed
from workers.engine.state.kv_cache import KVCache
from workers.engine.state.sequence import Sequence

DRAFT = "scripted:seed=3,order=1,eos_every=40,sharpness=1.0"
WORLD = "scripted:seed=3,order=2,eos_every=40,sharpness=1.0"
PROMPT = list(b"ABCAB")
A, B, C = TOKENS = tuple(b"ABC")
LENGTH = 4

Law = dict[tuple[int, ...], float]


def params(seed: int, **options: object) -> SamplingParams:
    """Nothing but A, B and C has a chance."""
    chosen = {"max_tokens": LENGTH, "temperature": 1.0, "top_k": 3, "logit_bias": dict.fromkeys(TOKENS, 100.0)}
    return SamplingParams(seed=seed, **{**chosen, **options})  # type: ignore[arg-type]


@cache
def conditional(model: str, path: tuple[int, ...]) -> dict[int, float]:
    """The model's own distribution after the prompt and `path`, from a pass of its own."""
    core = engine(model)
    seq = Sequence(Request(0, PROMPT + list(path), params(0)), 0, frozenset(), 1000)
    cache_ = KVCache(core.model.facts.cache_shape, 4, 16, prefix_reuse=False)
    cache_.open(seq)
    assert cache_.reserve(seq, len(seq))
    logits = core.model.executor.forward(Batch.pack([Feed(seq, 0, len(seq))], cache_), cache_).logits[:1]
    p = distributions(logits.double(), [RowContext(seq)])[0]
    return {token: p[token].item() for token in TOKENS}


@cache
def law_of_outputs(stop: int | None = None) -> Law:
    law: Law = {}

    def extend(path: tuple[int, ...], weight: float) -> None:
        if len(path) == LENGTH or (path and path[-1] == stop):
            law[path] = weight
            return
        for token, chance in conditional(WORLD, path).items():
            extend((*path, token), weight * chance)

    extend((), 1.0)
    return law


def speculation(**options: object) -> SpeculationConfig:
    chosen = {"method": "draft_model", "draft": DRAFT, "max_draft_tokens": 3, "policy": "fixed"}
    return SpeculationConfig(**{**chosen, **options})  # type: ignore[arg-type]


SCARCE: dict[str, object] = {"kv_blocks": 40, "block_size": 2}
"""Room for a dozen sequences until they grow."""
NGRAM = {"method": "ngram", "draft": None, "ngram_min": 1}
RUNS: dict[str, tuple[SpeculationConfig, dict[str, object], int | None]] = {
    "exact": (speculation(tree_width=2), {}, None),
    "rejection": (speculation(verify="rejection"), {}, None),
    "rejection, stops": (speculation(verify="rejection", policy="threshold"), SCARCE, B),
    "rejection, tree": (speculation(verify="rejection", tree_width=2), {}, B),
    "rejection, ngram": (speculation(verify="rejection", **NGRAM), {}, None),
    "block": (speculation(verify="block"), {}, None),
    "block, stops": (speculation(verify="block", policy="threshold"), SCARCE, B),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_law_of_outputs(name: str) -> None:
    config, options, stop = RUNS[name]
    stops = () if stop is None else (stop,)
    requests = [Request(seed, PROMPT, params(seed, stop_token_ids=stops)) for seed in range(1000)]
    core = engine(WORLD, speculation=config, **{"max_batch": 500, **options})
    done = run(core, requests, check=False)
    assert core.batcher.num_preemptions > 0 or options is not SCARCE
    assert p_value((completion.token_ids for completion in done.values()), law_of_outputs(stop)) > ALPHA
    assert sum(completion.stats.accepted for completion in done.values()) > 200
    for completion in done.values():
        reconcile(completion)
        assert completion.method == config.label(config.method)


def overlap(p: dict[int, float], q: dict[int, float]) -> float:
    """1 - TV: what rejection sampling accepts."""
    return sum(min(p[x], q[x]) for x in TOKENS)


def match(p: dict[int, float], q: dict[int, float]) -> float:
    """What the coupled rule accepts (Daliri, Musco and Suresh 2024)."""
    return sum(1 / sum(max(p[z] / p[x], q[z] / q[x]) for z in TOKENS) for x in TOKENS)


@pytest.mark.parametrize(("rule", "formula"), [("rejection", overlap), ("block", overlap), ("exact", match)])
def test_how_often_the_first_token_is_accepted(
    rule: str, formula: Callable[[dict[int, float], dict[int, float]], float]
) -> None:
    count = 1200
    requests = [Request(seed, PROMPT, params(seed, max_tokens=2)) for seed in range(count)]
    done = run(engine(WORLD, speculation=speculation(verify=rule), max_batch=count), requests, check=False)
    assert all(completion.stats.reached_per_depth == [1] for completion in done.values())
    accepted = sum(completion.stats.accepted for completion in done.values())
    expected = formula(conditional(WORLD, ()), conditional(DRAFT, ()))
    assert abs(accepted - count * expected) < 5 * math.sqrt(count * expected * (1 - expected))


@pytest.mark.parametrize("rule", ["exact", "rejection"])
def test_tokens_per_step_of_a_fixed_tree(rule: str) -> None:
    """1 + the sum over its nodes of the probability that the target's path comes to them."""
    tree = tree_of([(A, B, C), (A, C), (B, A), (B, B, A)])
    count = 1500
    speculated = SpeculationConfig("ngram", verify=rule, policy="fixed")
    config = EngineConfig(WORLD, speculation=speculated, max_batch=count, max_step_tokens=count * len(PROMPT))
    core = EngineCore(config, make=lambda context: {"ngram": FixedSpeculator(lambda seq, room: tree, 4)})
    for seed in range(count):
        assert core.add(Request(seed, PROMPT, params(seed, max_tokens=20))) is None
    assert core.step() == []
    emitted = np.array([seq.num_emitted for seq in core.batcher.running])

    def chance(path: tuple[int, ...]) -> float:
        return math.prod(conditional(WORLD, path[:depth])[token] for depth, token in enumerate(path))

    paths = [tuple(tree.tokens[n] for n in tree.path(node)) for node in range(len(tree))]
    expected = 1 + sum(map(chance, paths))
    assert abs(emitted.mean() - expected) < 5 * emitted.std() / math.sqrt(len(emitted))


GREEDY = {
    "rejection": speculation(verify="rejection", draft="target"),
    "rejection, other draft": speculation(verify="rejection"),
    "rejection, tree": speculation(verify="rejection", tree_width=3),
    "rejection, ngram": speculation(verify="rejection", **NGRAM),
    "block": speculation(verify="block", draft="target"),
    "typical": speculation(verify="typical", tree_width=2),
}


@pytest.mark.parametrize("name", GREEDY)
def test_temperature_zero_is_greedy_under_every_rule(name: str) -> None:
    """Same tokens, texts, reasons and log-probabilities as plain decoding, beside rows which are sampled."""
    requests = mixed_requests(60)
    greedy = [request.id for request in requests if request.params.temperature == 0.0]
    truth = answers(run(engine(), requests))
    done = run(engine(TARGET, speculation=GREEDY[name], max_batch=16), requests)
    found = answers(done)
    assert [found[key] for key in greedy] == [truth[key] for key in greedy]
    for request in requests:
        reconcile(done[request.id])
        wanted = request.params.logprobs is not None
        assert (done[request.id].logprobs is not None) == wanted
        if wanted:
            logprobs = done[request.id].logprobs or ()
            assert tuple(entry.token_id for entry in logprobs) == done[request.id].token_ids


def test_the_same_run_gives_the_same_tokens() -> None:
    requests = mixed_requests(40)
    for rule in ("rejection", "block"):
        config = speculation(verify=rule, draft="target")
        first, second = (run(engine(speculation=config, max_batch=size), requests) for size in (3, 32))
        assert answers(first) == answers(second), "with fixed draft lengths the batch does not matter"


def test_the_target_as_its_own_draft_is_accepted_under_every_rule() -> None:
    requests = [Request(seed, PROMPT, params(seed, max_tokens=20)) for seed in range(100)]
    for rule in ("exact", "rejection", "block"):
        done = run(engine(WORLD, speculation=speculation(verify=rule, draft="target")), requests)
        drafted = sum(completion.stats.drafted for completion in done.values())
        assert sum(completion.stats.accepted for completion in done.values()) == drafted > 1000


def test_rules_differ_in_what_they_draw() -> None:
    """Sampled tokens of one seed differ between the rules; only `exact` gives those of plain decoding."""
    requests = [Request(seed, PROMPT, params(seed, max_tokens=12)) for seed in range(20)]
    plain = answers(run(engine(WORLD), requests))
    assert answers(run(engine(WORLD, speculation=speculation()), requests)) == plain
    for rule, other in itertools.combinations(("exact", "rejection", "block"), 2):
        pair = [answers(run(engine(WORLD, speculation=speculation(verify=r)), requests)) for r in (rule, other)]
        assert pair[0] != pair[1]
