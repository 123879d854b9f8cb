"""Building blocks of the engine's tests: mixed requests, whole runs, oracles that know the answer."""

from __future__ import annotations

import random
from collections.abc import Iterable

from tests.support.engine.trees import tree_of
from workers.engine import Completion, EngineConfig, EngineCore, Request, SamplingParams, SpeculationConfig
from workers.engine.speculators.fixed import FixedSpeculator
from workers.engine.state.sequence import Sequence
from workers.engine.state.tree import DraftTree

TARGET = "scripted:seed=3,order=2,eos_every=40,sharpness=2.0"


def mixed_requests(count: int, *, seed: int = 0, max_tokens: int = 40, vocab: int = 257) -> list[Request]:
    """Requests of all lengths, with every sampling feature somewhere among them."""
    rng = random.Random(seed)
    return [
        Request(index, [rng.randrange(32, 127) for _ in range(rng.randrange(1, 60))], _params(rng, index, max_tokens))
        for index in range(count)
    ]


def _params(rng: random.Random, index: int, max_tokens: int) -> SamplingParams:
    features = {
        "temperature": (0.0, 0.7, 1.0)[index % 3],
        "top_p": rng.choice((1.0, 0.9)),
        "top_k": rng.choice((0, 0, 20)),
        "min_p": rng.choice((0.0, 0.0, 0.05)),
        "repetition_penalty": rng.choice((1.0, 1.0, 1.2)),
        "presence_penalty": rng.choice((0.0, 0.0, 0.6)),
        "frequency_penalty": rng.choice((0.0, 0.0, 0.4)),
        "logit_bias": rng.choice(({}, {}, {65: 3.0, 66: -100.0})),
        "bad_words": rng.choice(((), (), ((97,), (98, 99)))),
        "min_tokens": rng.choice((0, 0, 5)),
        "stop": rng.choice(((), (), ("z", "Qx"))),
        "stop_token_ids": rng.choice(((), (), (33, 34))),
        "ignore_eos": rng.random() < 0.2,
        "logprobs": rng.choice((None, None, 0, 3)),
        "seed": rng.randrange(2**63),
    }
    return SamplingParams(max_tokens=rng.randrange(5, max_tokens + 1), **features)  # type: ignore[arg-type]


def run(core: EngineCore, requests: Iterable[Request], *, check: bool = True) -> dict[object, Completion]:
    """Run the requests to their ends; checks the KV accounting after every step and that all is free at the end."""
    done: dict[object, Completion] = {}
    for request in requests:
        if (rejected := core.add(request)) is not None:
            done[request.id] = rejected
    while core.has_work:
        for completion in core.step():
            assert completion.request_id not in done
            done[completion.request_id] = completion
        if check:
            core.cache.check()
    assert core.cache.num_used == 0
    return done


def engine(target: str = TARGET, *, speculation: SpeculationConfig | None = None, **options: object) -> EngineCore:
    config = EngineConfig(target=target, speculation=speculation or SpeculationConfig(), **options)  # type: ignore[arg-type]
    return EngineCore(config)


def answers(done: dict[object, Completion]) -> dict[object, tuple[object, ...]]:
    """What must not depend on how it was computed."""
    return {
        key: (c.token_ids, c.text, c.finish_reason, c.stop_reason, c.error_code, c.logprobs) for key, c in done.items()
    }


def oracle(truth: dict[object, Completion], *, accuracy: float, width: int = 1, seed: int = 0) -> FixedSpeculator:
    """Proposes the true continuation, each token spoilt with probability 1 - accuracy, among wrong siblings."""
    rng = random.Random(seed)

    def spoilt(rest: tuple[int, ...]) -> list[int]:
        return [token if rng.random() < accuracy else rng.randrange(257) for token in rest]

    def noise(rest: tuple[int, ...]) -> list[int]:
        return [rng.randrange(257) for _ in range(rng.randrange(len(rest) + 1))]

    def propose(seq: Sequence, length: int) -> DraftTree:
        rest = truth[seq.request.id].token_ids[seq.num_emitted :][:length]
        wrong_first = [noise(rest)] if width > 1 else []
        return tree_of(wrong_first + [spoilt(rest) for _ in range(width - len(wrong_first))])

    return FixedSpeculator(propose, width)
