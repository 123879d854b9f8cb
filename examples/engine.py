"""The engine alone, from Python: one answer, then many as they finish.

    python examples/engine.py [MODEL]

MODEL is a directory, a hub id, a .gguf file or an alias; without one, smollm2-135m (`make model` installs it).
"""

from __future__ import annotations

import asyncio
import sys

from workers.engine import Completion, Engine, EngineConfig, Request, SamplingParams, SpeculationConfig

QUESTIONS = (
    "Name three rivers in Europe.",
    "Write the numbers from 1 to 20, separated by commas.",
    "What is the opposite of 'early'?",
    "Repeat this sentence three times: the tide turns twice a day.",
)


def request(engine: Engine, number: int, question: str, params: SamplingParams) -> Request:
    """A chat question as a request."""
    text = engine.tokenizer.render([{"role": "user", "content": question}])
    (token_ids,) = engine.tokenizer.encode_batch([text], special_tokens=False)
    return Request(id=number, prompt_token_ids=token_ids, params=params)


def show(completion: Completion) -> None:
    """The answer and what speculation did for it."""
    stats = completion.stats
    print(f"[{completion.request_id}] {completion.text.strip()}")
    print(
        f"    {stats.emitted} tokens in {stats.steps} steps, {stats.accepted} of {stats.drafted} draft tokens accepted"
    )


async def main(target: str) -> None:
    config = EngineConfig(target=target, max_batch=8, speculation=SpeculationConfig(method="ngram"))
    async with Engine(config) as engine:
        greedy = SamplingParams(max_tokens=48)
        show(await engine.generate(request(engine, 0, QUESTIONS[0], greedy)))

        sampled = SamplingParams(max_tokens=48, temperature=0.8, top_p=0.9, seed=7)
        requests = [request(engine, number, question, sampled) for number, question in enumerate(QUESTIONS, 1)]
        async for completion in engine.stream(requests):
            show(completion)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"))
