"""One decoding run in a process of its own: `python -m benchmarks.decode_once nightdraft|transformers --batch 64`.

Prints one JSON object: tokens, seconds with the model loaded, and, for nightdraft, where a step's time goes.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch

MODEL = "smollm2-135m"
TOPICS = ("the sea", "a bicycle", "winter mornings", "the history of bread", "maps", "gardens", "night trains", "tea")
STYLES = (
    "Write a short story about {}.",
    "Explain {} to a child, step by step.",
    "List ten facts about {} and say why each one matters.",
    "Write a letter to a friend who has never heard of {}.",
    "Compare {} with something that seems unrelated to it.",
    "Summarise what most people believe about {} in three paragraphs.",
    "Write a dialogue between two experts on {}.",
    "Give advice to somebody who wants to learn about {}.",
)
PROMPTS = [style.format(topic) for topic in TOPICS for style in STYLES]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("engine", choices=("nightdraft", "transformers"))
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--method", default="none")
    options = parser.parse_args()
    torch.manual_seed(0)
    decode = _nightdraft if options.engine == "nightdraft" else _transformers
    print(json.dumps(decode(options)))


def _nightdraft(options: argparse.Namespace) -> dict[str, Any]:
    from workers.engine import EngineConfig, EngineCore, Request, SamplingParams, SpeculationConfig

    config = EngineConfig(
        target=MODEL,
        dtype=options.dtype,
        max_batch=options.batch,
        max_model_len=1024,
        speculation=SpeculationConfig(method=options.method),
    )
    core = EngineCore(config)
    params = SamplingParams(max_tokens=options.tokens, ignore_eos=True)
    encoded = [chat_ids(core.model.tokenizer, prompt) for prompt in PROMPTS[: options.prompts]]
    _run_core(core, [Request("warm-up", encoded[0], SamplingParams(max_tokens=4))])
    core.profile.seconds.clear()
    core.profile.steps = 0
    started = time.perf_counter()
    tokens = _run_core(core, [Request(i, ids, params) for i, ids in enumerate(encoded)])
    seconds = time.perf_counter() - started
    return {"tokens": tokens, "seconds": seconds, "steps": core.profile.steps, "parts": core.profile.seconds}


def _run_core(core: Any, requests: list[Any]) -> int:
    tokens = 0
    for request in requests:
        core.add(request)
    while core.has_work:
        tokens += sum(len(completion.token_ids) for completion in core.step())
    return tokens


def chat_ids(tokenizer: Any, prompt: str) -> list[int]:
    text = tokenizer.render([{"role": "user", "content": prompt}])
    ids: list[int] = tokenizer.encode_batch([text], special_tokens=False)[0]
    return ids


def transformers_model(dtype: str) -> tuple[Any, Any]:
    """The same weights in transformers, and a tokenizer that pads on the left."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from workers.engine.models.loading.gguf_copy import converted
    from workers.engine.models.loading.sources import resolve

    directory = converted(resolve(MODEL)).path
    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
    return AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)), tokenizer


def _transformers(options: argparse.Namespace) -> dict[str, Any]:
    model, tokenizer = transformers_model(options.dtype)
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": p}], tokenize=False, add_generation_prompt=True)
        for p in PROMPTS[: options.prompts]
    ]
    length = {"max_new_tokens": options.tokens, "min_new_tokens": options.tokens}
    with torch.inference_mode():
        model.generate(**tokenizer(texts[:1], return_tensors="pt"), max_new_tokens=4, do_sample=False)
        started = time.perf_counter()
        tokens = 0
        for start in range(0, len(texts), options.batch):
            inputs = tokenizer(
                texts[start : start + options.batch], return_tensors="pt", padding=True, add_special_tokens=False
            )
            output = model.generate(**inputs, do_sample=False, **length)
            tokens += output[:, inputs["input_ids"].shape[1] :].numel()
        seconds = time.perf_counter() - started
    return {"tokens": tokens, "seconds": seconds}


if __name__ == "__main__":
    main()
