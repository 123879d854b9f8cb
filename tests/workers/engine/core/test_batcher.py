from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.engine.runs import answers, engine, run
from workers.engine import Completion, FinishReason, Request, SamplingParams, SpeculationConfig
from workers.engine.api.errors import InvalidConfig, InvalidParams

NO_LIST = "prompt_token_ids must be a list of integers"
NO_INTEGERS = "prompt_token_ids must be integers"
BAD_FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "empty": ({"prompt_token_ids": []}, "no tokens"),
    "array": ({"prompt_token_ids": np.array([65, 66])}, NO_LIST),
    "scalar array": ({"prompt_token_ids": np.array(65)}, NO_LIST),
    "tensor": ({"prompt_token_ids": torch.tensor([65, 66])}, NO_LIST),
    "text": ({"prompt_token_ids": "AB"}, NO_LIST),
    "none": ({"prompt_token_ids": None}, NO_LIST),
    "number": ({"prompt_token_ids": 65}, NO_LIST),
    "mapping": ({"prompt_token_ids": {65: 66}}, NO_LIST),
    "iterator": ({"prompt_token_ids": iter([65])}, NO_LIST),
    "float": ({"prompt_token_ids": [65.5]}, NO_INTEGERS),
    "whole float": ({"prompt_token_ids": [65.0]}, NO_INTEGERS),
    "bool": ({"prompt_token_ids": [65, True]}, NO_INTEGERS),
    "texts": ({"prompt_token_ids": [65, "66"]}, NO_INTEGERS),
    "lists": ({"prompt_token_ids": [[65], [66]]}, NO_INTEGERS),
    "scalars": ({"prompt_token_ids": [torch.tensor(65)]}, NO_INTEGERS),
    "beyond": ({"prompt_token_ids": [5000]}, "0..256"),
    "far beyond": ({"prompt_token_ids": [2**70]}, "0..256"),
    "negative": ({"prompt_token_ids": [-1]}, "0..256"),
    "params": ({"params": None}, "params must be SamplingParams"),
    "params mapping": ({"params": {"max_tokens": 3}}, "params must be SamplingParams"),
    "sample": ({"sample": "0"}, "sample must be"),
    "negative sample": ({"sample": -1}, "sample must be"),
    "method": ({"method": ["none"]}, "method must be a name"),
    "unknown method": ({"method": "eagle"}, "not set up"),
    "scope": ({"scope": ["job"]}, "scope must be hashable"),
    "scope inside": ({"scope": ("job", [])}, "scope must be hashable"),
}
"""What a request may hold, and what is said about it."""


def request(index: int, prompt: int, max_tokens: int = 8) -> Request:
    return Request(index, [65 + index % 26] * prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))


def test_a_long_prompt_comes_in_chunks_and_the_others_go_on() -> None:
    core = engine(max_batch=4, max_step_tokens=8)
    core.add(request(0, 3, 30))
    core.step()
    core.add(request(1, 50))
    rows = []
    for _ in range(8):
        feeds = core.batcher.schedule()
        rows.append([feed.num_rows for feed in feeds])
        core.cache.commit(feeds[-1].seq, feeds[-1].end)
    assert rows == [[1, 7]] * 7 + [[1, 1]], "one token for the first, the rest of the budget for the prompt"


def test_a_request_that_never_fits_fails_at_once() -> None:
    core = engine(kv_blocks=4, block_size=4)
    rejected = core.add(request(0, 10, 8))
    assert rejected is not None
    assert rejected.finish_reason is FinishReason.ERROR
    assert rejected.error_code == "prompt_too_long"
    assert "16" in str(rejected.error_message)
    assert core.add(request(1, 8, 8)) is None
    assert not core.batcher.waiting or core.has_work


def test_a_prompt_as_long_as_the_context_fails_at_once() -> None:
    core = engine(max_model_len=16)
    assert core.add(request(0, 16)).error_code == "prompt_too_long"  # type: ignore[union-attr]
    done = run(core, [request(1, 15)])
    assert len(done[1].token_ids) == 1
    assert done[1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(("changes", "message"), BAD_FIELDS.values(), ids=BAD_FIELDS)
def test_whatever_a_request_holds_it_fails_alone(changes: dict[str, Any], message: str) -> None:
    core = engine(speculation=SpeculationConfig(method="suffix", row_methods=("none",)))
    good = [request(index, 5) for index in range(3)]
    bad = Request(**{"id": "bad", "prompt_token_ids": [65, 66], **changes})
    done = run(core, [good[0], bad, *good[1:]])
    assert (done["bad"].error_code, done["bad"].finish_reason) == (
        "empty_prompt" if message == "no tokens" else "invalid_params",
        FinishReason.ERROR,
    )
    assert message in str(done["bad"].error_message)
    assert answers({r.id: done[r.id] for r in good}) == answers(run(engine(), good))


def test_an_id_that_answers_cannot_be_kept_under_is_refused_when_it_is_made() -> None:
    with pytest.raises(InvalidParams, match="hashable"):
        Request([1], [65])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"kv_blocks": 1}, "kv_blocks must be at least 2"), ({"kv_memory": 1000}, "kv_memory of 1000 bytes is too small")],
)
def test_a_pool_that_is_too_small_for_anything_is_refused_at_start(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        engine(**options)


def test_preemption_recomputes_and_everybody_finishes() -> None:
    requests = [request(index, 6, 40) for index in range(10)]
    tight = engine(kv_blocks=14, block_size=4, max_batch=10)
    assert answers(run(tight, requests)) == answers(run(engine(), requests))
    assert tight.batcher.num_preemptions > 0


def test_admission_waits_for_room() -> None:
    core = engine(kv_blocks=13, block_size=4, max_batch=10)
    for index in range(10):
        core.add(request(index, 20, 8))
    core.step()
    assert len(core.batcher.running) == 2
    assert len(core.batcher.waiting) == 8


def test_small_requests_pass_a_big_one_that_waits_for_room() -> None:
    core = engine(kv_blocks=13, block_size=4, max_batch=4)
    requests = [request(0, 24, 20), request(1, 40, 8), *(request(index, 4, 4) for index in range(2, 40))]
    done: dict[object, Completion] = {}
    for one in requests:
        core.add(one)
    core.step()
    assert [seq.request.id for seq in core.batcher.running] == [0, 2, 3, 4]
    while all(seq.request.id != 1 for seq in core.batcher.running):
        done |= {completion.request_id: completion for completion in core.step()}
    place = [seq.request.id for seq in core.batcher.running].index(1)
    assert len(done) + place - 1 == 4, "as many as a batch holds, and request 0, went before it"
    done |= run(core, [])
    assert answers(done) == answers(run(engine(), requests))


@pytest.mark.parametrize("seed", range(3))
def test_nobody_is_overtaken_without_bound(seed: int) -> None:
    """Under drafts and preemption, with requests of all sizes that keep coming."""
    rng = random.Random(seed)
    sizes = [rng.choice((2, 3, 4, 40, 60)) for _ in range(120)]
    requests = [request(index, size, rng.randrange(1, 30)) for index, size in enumerate(sizes)]
    core = engine(kv_blocks=24, block_size=4, max_batch=6, speculation=SpeculationConfig(method="ngram"))
    overtaken = Counter[object]()
    done: dict[object, Completion] = {}
    coming = list(reversed(requests))
    while coming or core.has_work:
        for _ in range(min(len(coming), 3)):
            core.add(coming.pop())
        before = [seq.request.id for seq in core.batcher.waiting]
        done |= {completion.request_id: completion for completion in core.step()}
        overtaken.update(
            {seq.request.id: seq.num_overtaken for seq in core.batcher.waiting if seq.request.id in before}
        )
        assert all(seq.num_overtaken <= 6 for seq in (*core.batcher.waiting, *core.batcher.running))
        core.cache.check()
    assert overtaken.total() > 0
    assert answers(done) == answers(run(engine(), requests))


def test_an_id_in_flight_is_refused() -> None:
    core = engine()
    core.add(request(0, 3))
    with pytest.raises(ValueError, match="in flight"):
        core.add(request(0, 3))


def test_abort_returns_what_there_is_and_frees_everything() -> None:
    core = engine(max_batch=1)
    core.add(request(0, 3, 100))
    core.add(request(1, 3, 100))
    for _ in range(5):
        core.step()
    running, waiting = core.abort(0), core.abort(1)
    assert running is not None
    assert waiting is not None
    assert running.finish_reason is waiting.finish_reason is FinishReason.ABORT
    assert (len(running.token_ids), len(waiting.token_ids)) == (5, 0)
    assert core.abort(0) is None
    assert not core.has_work
    assert core.cache.num_used == 0


def test_a_shared_system_prompt_is_computed_once_even_in_one_step() -> None:
    core = engine(max_batch=8, block_size=4)
    prompt = list(b"you are a helpful assistant. ")
    requests = [Request(i, [*prompt, 65 + i], SamplingParams(max_tokens=5)) for i in range(8)]
    done = run(core, requests)
    assert core.cache.num_reused_tokens == 7 * (len(prompt) // 4) * 4
    assert answers(done) == answers(run(engine(prefix_reuse=False), requests))


@pytest.mark.parametrize("verify", ["exact", "rejection", "typical"])
def test_a_request_that_cannot_be_sampled_fails_alone(verify: str) -> None:
    """Everything is masked from its third token on; the others of its batch do not notice."""
    speculation = SpeculationConfig(method="draft_model", draft="target", verify=verify, policy="fixed")
    bad_words = tuple((token,) for token in range(257) if token not in (65, 66))
    params = SamplingParams(
        max_tokens=20, ignore_eos=True, bad_words=(*bad_words, (65, 65), (66, 65), (65, 66), (66, 66))
    )
    good = [request(index, 5, 12) for index in range(4)]
    core = engine(speculation=speculation)
    done = run(core, [*good, Request("bad", [1, 2, 3], params)])
    assert done["bad"].error_code == "sampling_failed"
    assert done["bad"].token_ids == ()
    assert all(len(done[r.id].token_ids) == 12 for r in good)
    assert core.snapshot().finished == 4
