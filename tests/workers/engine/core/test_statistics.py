"""Promise 4: every drafted token is accounted for, in integers, per request."""

from __future__ import annotations

import pytest

from tests.support.engine.counts import reconcile
from tests.support.engine.runs import TARGET, engine, mixed_requests, oracle, run
from workers.engine import (
    AcceptanceStats,
    Completion,
    EngineConfig,
    EngineCore,
    FinishReason,
    Request,
    SamplingParams,
    SpeculationConfig,
)
from workers.engine.speculators.fixed import FixedSpeculator
from workers.engine.state.tree import DraftTree

FIXED = SpeculationConfig(method="ngram", max_draft_tokens=4, policy="fixed")


@pytest.mark.parametrize("accuracy", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("width", [1, 3])
def test_the_counts_reconcile(accuracy: float, width: int) -> None:
    requests = mixed_requests(60)
    truth = run(engine(), requests)
    core = EngineCore(
        EngineConfig(target=TARGET, max_batch=8, speculation=FIXED),
        make=lambda context: {"none": oracle(truth, accuracy=accuracy, width=width)},
    )
    done = run(core, requests)
    for completion in done.values():
        reconcile(completion)
    totals = core.snapshot()
    assert totals.drafted == sum(c.stats.drafted for c in done.values())
    assert totals.emitted == sum(len(c.token_ids) for c in done.values())


DRAFTING = {
    verify: SpeculationConfig(method="draft_model", draft="target", verify=verify, policy="fixed")
    for verify in ("exact", "rejection", "block", "typical")
}


@pytest.mark.parametrize("verify", DRAFTING)
def test_the_totals_of_an_engine_count_every_step_as_it_happens(verify: str) -> None:
    """Requests that still run count, and those that are aborted, and those that were preempted count once."""
    core = EngineCore(EngineConfig(TARGET, DRAFTING[verify], max_batch=8, kv_blocks=10))
    for request in mixed_requests(20):
        core.add(request)
    ended: list[Completion] = []
    while core.has_work:
        ended += core.step()
        if core.batcher.running and not any(done.finish_reason is FinishReason.ABORT for done in ended):
            aborted = core.abort(core.batcher.running[0].request.id)
            assert aborted is not None
            ended.append(aborted)
        alive = [seq.stats for seq in (*core.batcher.running, *core.batcher.waiting)]
        counted = [*alive, *(done.stats for done in ended)]
        now = core.snapshot()
        assert now.emitted == sum(stats.emitted for stats in counted)
        assert (now.steps, now.drafted, now.accepted) == (
            sum(stats.steps for stats in counted),
            sum(stats.drafted for stats in counted),
            sum(stats.accepted for stats in counted),
        )
    assert now.preemptions > 0
    assert now.finished == len(ended) == 20
    assert now.emitted == sum(len(done.token_ids) for done in ended)


@pytest.mark.parametrize("verify", DRAFTING)
def test_what_a_failed_request_emitted_is_in_the_totals_alone(verify: str) -> None:
    """Everything is masked after its first token."""
    words = tuple((token,) for token in range(257) if token not in (65, 66))
    words += ((65, 65), (66, 65), (65, 66), (66, 66))
    params = SamplingParams(max_tokens=20, ignore_eos=True, bad_words=words)
    core = EngineCore(EngineConfig(TARGET, DRAFTING[verify]))
    done = run(core, [*mixed_requests(5), Request("fails", list(b"never"), params)])
    assert done["fails"].finish_reason is FinishReason.ERROR
    totals = core.snapshot()
    assert totals.emitted - sum(len(completion.token_ids) for completion in done.values()) == 1
    assert totals.finished == 5


def test_the_target_as_its_own_draft_is_always_accepted() -> None:
    requests = mixed_requests(40)
    speculation = SpeculationConfig(method="draft_model", draft="target", max_draft_tokens=4, policy="fixed")
    stop_free = [Request(r.id, r.prompt_token_ids, _without_stop_strings(r.params)) for r in requests]
    done = run(engine(speculation=speculation), stop_free)
    assert sum(c.stats.drafted for c in done.values()) > 100
    for completion in done.values():
        assert completion.stats.accepted == completion.stats.drafted


def _without_stop_strings(params: SamplingParams) -> SamplingParams:
    return SamplingParams(
        max_tokens=params.max_tokens, temperature=params.temperature, top_p=params.top_p, seed=params.seed
    )


def test_plain_decoding_drafts_nothing() -> None:
    for completion in run(engine(), mixed_requests(10)).values():
        assert completion.stats.drafted == completion.stats.accepted == 0
        assert completion.stats.reached_per_depth == []
        assert completion.stats.steps == len(completion.token_ids)


def _drafting(draft: list[int], params: SamplingParams, length: int = 4) -> Completion:
    """One request whose every draft is the given chain, or the true continuation when `draft` is empty."""
    prompt = list(b"tell me")
    truth = run(engine(), [Request(0, prompt, SamplingParams(max_tokens=30, ignore_eos=True))])
    rest = truth[0].token_ids

    core = EngineCore(
        EngineConfig(
            target=TARGET, speculation=SpeculationConfig(method="ngram", max_draft_tokens=length, policy="fixed")
        ),
        make=lambda context: {
            "none": FixedSpeculator(
                lambda seq, room: DraftTree.chain(draft or rest[seq.num_emitted : seq.num_emitted + room])
            )
        },
    )
    return run(core, [Request(0, prompt, params)])[0]


@pytest.mark.parametrize("stop_at", range(1, 12))
def test_a_stop_at_every_offset_of_a_run(stop_at: int) -> None:
    """The token that ends the sequence is the bonus; what was drafted behind it is trimmed, neither hit nor miss."""
    prompt = list(b"tell me")
    free = run(engine(), [Request(0, prompt, SamplingParams(max_tokens=30, ignore_eos=True))])[0].token_ids
    stop = free[stop_at]
    first = free.index(stop)
    params = SamplingParams(max_tokens=30, ignore_eos=True, stop_token_ids=(stop,))
    completion = _drafting([], params)
    assert completion.token_ids == free[: first + 1]
    assert completion.finish_reason is FinishReason.STOP
    reconcile(completion)
    stats = completion.stats
    assert stats.reached_per_depth == stats.accepted_per_depth, "a perfect draft was never rejected"


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_max_tokens_at_every_offset_of_a_run(max_tokens: int) -> None:
    completion = _drafting([], SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    assert len(completion.token_ids) == max_tokens
    assert completion.finish_reason is FinishReason.LENGTH
    assert completion.stats.trimmed == 0
    assert completion.stats.accepted == completion.stats.drafted
    reconcile(completion)


def test_a_rejected_step_by_hand() -> None:
    stats = AcceptanceStats()
    stats.count_step(drafted=4, accepted=2, trimmed=0, reached=3)
    stats.count_step(drafted=3, accepted=0, trimmed=1, reached=1)
    assert (stats.steps, stats.drafted, stats.accepted, stats.trimmed, stats.emitted) == (2, 7, 2, 1, 4)
    assert stats.histogram == [1, 0, 1]
    assert stats.reached_per_depth == [2, 1, 1]
    assert stats.accepted_per_depth == [1, 1]
