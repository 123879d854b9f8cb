from __future__ import annotations

import pytest

from tests.workers.engine.helpers import answers, engine, run
from workers.engine import FinishReason, Request, SamplingParams, SpeculationConfig


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


@pytest.mark.parametrize(
    ("prompt", "code"), [([], "empty_prompt"), ([5000], "invalid_params"), ([-1], "invalid_params")]
)
def test_bad_prompts_are_completions_with_a_code(prompt: list[int], code: str) -> None:
    rejected = engine().add(Request(0, prompt))
    assert rejected is not None
    assert rejected.error_code == code


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
