from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import anyio
import numpy as np
import pytest
import torch

from tests.support.engine.runs import TARGET, answers, engine, mixed_requests, run
from workers.engine import Engine, EngineConfig, FinishReason, Request, SamplingParams, SpeculationConfig
from workers.engine.api.errors import EngineStopped, InvalidConfig

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def endless(index: int) -> Request:
    return Request(index, b"go on", SamplingParams(max_tokens=3000, ignore_eos=True))


async def test_generate_answers_one() -> None:
    async with Engine(EngineConfig(target=TARGET)) as started:
        prompt = started.tokenizer.encode("hello")
        completion = await started.generate(Request("a", prompt, SamplingParams(max_tokens=5, ignore_eos=True)))
    assert completion.request_id == "a"
    assert len(completion.token_ids) == 5
    assert completion.num_prompt_tokens == 5


async def test_a_stream_answers_every_request_as_the_core_would() -> None:
    requests = mixed_requests(80)
    async with Engine(EngineConfig(target=TARGET, max_batch=8)) as started:
        done = {c.request_id: c async for c in started.stream(requests, ahead=20)}
    assert answers(done) == answers(run(engine(), requests))


async def test_an_async_source_is_pulled_lazily() -> None:
    pulled = 0

    async def source() -> AsyncIterator[Request]:
        nonlocal pulled
        for request in mixed_requests(50):
            pulled += 1
            yield request

    async with Engine(EngineConfig(target=TARGET, max_batch=2)) as started:
        seen = 0
        async for _ in started.stream(source(), ahead=6):
            seen += 1
            assert pulled <= seen + 6
    assert seen == 50


async def test_requests_from_many_tasks_share_one_batch() -> None:
    async with Engine(EngineConfig(target=TARGET, max_batch=16)) as started:
        async with anyio.create_task_group() as group:
            for index in range(16):
                params = SamplingParams(max_tokens=50, ignore_eos=True)
                group.start_soon(started.generate, Request(index, b"hi", params))
        assert started.profile.steps < 200
        assert started.snapshot().finished == 16


async def test_abort_gives_an_abort_completion() -> None:
    async with Engine(EngineConfig(target=TARGET + ",delay_ms=1")) as started, anyio.create_task_group() as group:
        group.start_soon(_abort_soon, started)
        completion = await started.generate(endless(0))
    assert completion.finish_reason is FinishReason.ABORT


async def _abort_soon(started: Engine) -> None:
    await anyio.sleep(0.05)
    await started.abort(0)


async def test_leaving_a_stream_early_aborts_the_rest() -> None:
    async with Engine(EngineConfig(target=TARGET + ",delay_ms=1", max_batch=4)) as started:
        first = Request("short", b"x", SamplingParams(max_tokens=1))
        async with aclosing(started.stream([first, *map(endless, range(3))])) as completions:
            async for completion in completions:
                assert completion.request_id == "short"
                break
        with anyio.fail_after(5):
            while started.snapshot().running or started.snapshot().waiting:
                await anyio.sleep(0.01)


async def test_cancelling_the_caller_aborts_the_request() -> None:
    async with Engine(EngineConfig(target=TARGET + ",delay_ms=1")) as started:
        with anyio.move_on_after(0.05):
            await started.generate(endless(0))
        with anyio.fail_after(5):
            while started.snapshot().running:
                await anyio.sleep(0.01)
        again = await started.generate(Request(0, b"x", SamplingParams(max_tokens=1)))
        assert again.request_id == 0


async def test_a_failing_pass_stops_everybody_by_name() -> None:
    async with Engine(EngineConfig(target=TARGET + ",fail_on=boom")) as started:
        with pytest.raises(EngineStopped, match="scripted failure"):
            await started.generate(Request(0, b"boom"))
        with pytest.raises(EngineStopped):
            await started.generate(Request(1, b"fine"))


async def test_a_bad_configuration_is_named_on_entering() -> None:
    with pytest.raises(InvalidConfig, match="unknown option 'vocabulary'"):
        async with Engine(EngineConfig(target="scripted:vocabulary=3")):
            pass


async def test_bad_requests_are_completions_and_the_others_do_not_notice() -> None:
    prompts: list[Any] = [b"good", [], np.array([65, 66]), torch.tensor([65]), "text", None, [65.5], b"good"]
    requests = [Request(index, prompt, SamplingParams(max_tokens=4)) for index, prompt in enumerate(prompts)]
    requests.append(replace(requests[0], id=len(prompts), params=None, scope=[]))  # type: ignore[arg-type]
    async with Engine(EngineConfig(target=TARGET, speculation=SpeculationConfig(method="suffix"))) as started:
        done = {c.request_id: c async for c in started.stream(requests)}
        with pytest.raises(TypeError, match="Requests"):
            await started.generate({"prompt_token_ids": [65]})  # type: ignore[arg-type]
        again = await started.generate(replace(requests[0], id="again"))
    codes = [done[index].error_code for index in range(len(requests))]
    assert codes == [None, "empty_prompt", *["invalid_params"] * 5, None, "invalid_params"]
    assert done[0].token_ids == done[7].token_ids == again.token_ids
