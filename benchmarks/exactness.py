"""Does speculation change a token? The real model, every method, against plain decoding and against transformers.

float32: greedy output against transformers' generate, and mixed sampling against plain decoding at batch 1, identical
in every setting. bfloat16: the rows that differ between settings, each with the margin that it turned on.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.decode_once import MODEL, PROMPTS, chat_ids
from benchmarks.machine import describe
from benchmarks.random_drafts import write_eagle, write_medusa
from workers.engine import Completion, EngineConfig, EngineCore, Request, SamplingParams, SpeculationConfig
from workers.engine.models.executor import LoadedModel
from workers.engine.models.loading.load import load_model

TOKENS = 24
METHODS = {
    "none": SpeculationConfig(),
    "ngram": SpeculationConfig(method="ngram", ngram_min=1, policy="fixed"),
    "suffix": SpeculationConfig(method="suffix", policy="fixed"),
    "draft chain": SpeculationConfig(method="draft_model", draft="target", max_draft_tokens=3, policy="fixed"),
    "draft tree": SpeculationConfig(
        method="draft_model", draft="target", max_draft_tokens=2, tree_width=3, policy="fixed"
    ),
    "threshold": SpeculationConfig(method="ngram", ngram_min=1, max_draft_tokens=8),
    "draft dynamic": SpeculationConfig(
        method="draft_model", draft="target", max_draft_tokens=3, tree_width=2, tree_nodes=5, policy="fixed"
    ),
    "int8 copy": SpeculationConfig(
        method="draft_model", draft="target", draft_dtype="int8", max_draft_tokens=3, policy="fixed"
    ),
    "self": SpeculationConfig(method="self", skip=("attn.9", "attn.17", "mlp.21"), policy="fixed"),
    "self tree": SpeculationConfig(
        method="self", skip=("attn.9", "attn.17"), max_draft_tokens=2, tree_width=2, policy="fixed"
    ),
}


def with_random_drafts(folder: Path) -> dict[str, SpeculationConfig]:
    """All methods: medusa and eagle as well, with heads and a layer that nobody trained."""
    medusa, eagle = write_medusa(folder, MODEL), write_eagle(folder, MODEL)
    return METHODS | {
        "medusa": SpeculationConfig(
            method="medusa", draft=medusa, max_draft_tokens=2, tree_paths=((0,), (1,), (0, 0)), policy="fixed"
        ),
        "medusa dynamic": SpeculationConfig(method="medusa", draft=medusa, max_draft_tokens=3, policy="fixed"),
        "eagle chain": SpeculationConfig(method="eagle", draft=eagle, tree_width=1, policy="fixed"),
        "eagle dynamic": SpeculationConfig(method="eagle", draft=eagle, max_draft_tokens=3, policy="fixed"),
    }


SETTINGS: dict[str, dict[str, Any]] = {
    "batch 32": {"max_batch": 32},
    "batch 32, small pool": {"max_batch": 32, "kv_blocks": 48},
    "batch 4": {"max_batch": 4, "max_step_tokens": 64},
    "batch 1": {"max_batch": 1},
}
SMALL_BATCHES = ("batch 1", "batch 4")
STANDING_FOR_ALL = ("none", "ngram", "draft chain", "draft tree")
"""In small batches a run takes minutes: unless everything is asked for, these stand for methods that work alike."""


@dataclass(frozen=True, slots=True)
class Outcome:
    completions: dict[Any, Completion]
    preemptions: int
    accepted: int

    @property
    def tokens(self) -> dict[Any, tuple[int, ...]]:
        return {key: completion.token_ids for key, completion in self.completions.items()}


def load(dtype: str, attention: str = "auto") -> LoadedModel:
    return load_model(EngineConfig(target=MODEL, dtype=dtype, max_model_len=1024, attention=attention))


def decode(
    model: LoadedModel,
    requests: Sequence[Request],
    speculation: SpeculationConfig = METHODS["none"],
    setting: str = "batch 32",
) -> Outcome:
    """Run the requests to their ends with one method in one setting."""
    config = EngineConfig(
        target=MODEL,
        dtype=model.report.dtype,
        max_model_len=1024,
        kv_memory=2**29,
        speculation=speculation,
        **SETTINGS[setting],
    )
    core = EngineCore(config, model=model)
    for request in requests:
        core.add(request)
    completions: dict[Any, Completion] = {}
    while core.has_work:
        completions.update((completion.request_id, completion) for completion in core.step())
    core.cache.check()
    return Outcome(completions, core.batcher.num_preemptions, core.snapshot().accepted)


def greedy_requests(model: LoadedModel, count: int, tokens: int) -> list[Request]:
    params = SamplingParams(max_tokens=tokens)
    return [Request(i, chat_ids(model.tokenizer, prompt), params) for i, prompt in enumerate(PROMPTS[:count])]


def mixed_requests(model: LoadedModel, count: int, tokens: int) -> list[Request]:
    """Temperatures 0, 0.7 and 1.0, top-p 0.9 and penalties, mixed in one batch."""
    rng = random.Random(1)
    return [
        Request(
            index,
            chat_ids(model.tokenizer, f"{PROMPTS[index % len(PROMPTS)]} ({index})"),
            SamplingParams(
                max_tokens=tokens,
                temperature=(0.0, 0.7, 1.0)[index % 3],
                top_p=rng.choice((1.0, 0.9)),
                repetition_penalty=rng.choice((1.0, 1.1)),
                presence_penalty=rng.choice((0.0, 0.5)),
                frequency_penalty=rng.choice((0.0, 0.3)),
                min_p=rng.choice((0.0, 0.02)),
                seed=rng.randrange(2**63),
            ),
        )
        for index in range(count)
    ]


def transformers_greedy(requests: Sequence[Request], dtype: str) -> dict[Any, tuple[int, ...]]:
    """What transformers' generate answers, one prompt at a time, without padding."""
    from benchmarks.decode_once import transformers_model

    model, _ = transformers_model(dtype)
    answers = {}
    with torch.inference_mode():
        for request in requests:
            ids = torch.tensor([list(request.prompt_token_ids)])
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=request.params.max_tokens
            )
            answers[request.id] = tuple(output[0, ids.shape[1] :].tolist())
    return answers


def differing(left: dict[Any, tuple[int, ...]], right: dict[Any, tuple[int, ...]]) -> list[Any]:
    return [key for key in left if left[key] != right[key]]


def margin(model: LoadedModel, request: Request, ours: Sequence[int], theirs: Sequence[int]) -> float:
    """Gap between the two tokens at which the answers part, as a log-probability, in one pass over the shared text.

    Infinite when one answer is a prefix of the other, which no near-tie explains.
    """
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    if at is None:
        return float("inf")
    shared = [*request.prompt_token_ids, *ours[:at]]
    params = SamplingParams(max_tokens=1, logprobs=20)
    core = EngineCore(EngineConfig(target=MODEL, max_model_len=1024, kv_memory=2**29), model=model)
    core.add(Request("margin", shared, params))
    (completion,) = core.step()
    assert completion.logprobs is not None
    known = dict(completion.logprobs[0].top)
    return abs(known.get(ours[at], float("-inf")) - known.get(theirs[at], float("-inf")))


def run(prompts: int = 50, mixed: int = 200, *, everything: bool = False) -> None:
    print(f"exactness: {MODEL}, {TOKENS} tokens each; {describe()}")
    with tempfile.TemporaryDirectory() as folder:
        methods = with_random_drafts(Path(folder))
        model = load("float32")
        _against_transformers(model, methods, prompts)
        _against_plain(model, _plan(methods, everything), mixed, "float32")
        del model
        _against_plain(load("bfloat16"), _plan(methods, everything), mixed, "bfloat16")


def _plan(methods: dict[str, SpeculationConfig], everything: bool) -> list[tuple[str, str, SpeculationConfig]]:
    """Which method runs in which setting."""
    return [
        (setting, method, speculation)
        for setting in SETTINGS
        for method, speculation in methods.items()
        if everything or setting not in SMALL_BATCHES or method in STANDING_FOR_ALL
    ]


def _against_transformers(model: LoadedModel, methods: dict[str, SpeculationConfig], prompts: int) -> None:
    requests = greedy_requests(model, prompts, TOKENS)
    expected = transformers_greedy(requests, "float32")
    print(f"\nfloat32, greedy, {len(requests)} prompts: rows that differ from transformers' generate")
    for method, speculation in methods.items():
        outcome = decode(model, requests, speculation)
        print(f"  {method:<14} {len(differing(outcome.tokens, expected))} of {len(requests)}", flush=True)


def _against_plain(
    model: LoadedModel, plan: Sequence[tuple[str, str, SpeculationConfig]], mixed: int, dtype: str
) -> None:
    requests = mixed_requests(model, mixed, TOKENS)
    truth = decode(model, requests, setting="batch 1").tokens
    print(f"\n{dtype}, {mixed} requests, temperatures 0, 0.7, 1.0 with penalties: rows that differ from batch 1, none")
    by_id = {request.id: request for request in requests}
    for setting, method, speculation in plan:
        started = time.perf_counter()
        outcome = decode(model, requests, speculation, setting)
        rows = differing(outcome.tokens, truth)
        gaps = [margin(model, by_id[row], outcome.tokens[row], truth[row]) for row in rows]
        note = f", {outcome.preemptions} preemptions" if outcome.preemptions else ""
        print(
            f"  {setting:<22} {method:<14} {len(rows)} of {mixed}"
            f" ({time.perf_counter() - started:.0f} s, {outcome.accepted} accepted{note})"
            + (f"; top-2 margins at most {max(gaps):.4f}" if gaps else ""),
            flush=True,
        )
