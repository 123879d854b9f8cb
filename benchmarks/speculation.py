"""Does speculation cost? Methods and policies against plain decoding, at several batch sizes, in one process."""

from __future__ import annotations

import time
from dataclasses import replace

from benchmarks.decode_once import MODEL, PROMPTS, chat_ids
from benchmarks.machine import describe, foreign_load
from benchmarks.ratios import paired, spread
from workers.engine import EngineConfig, EngineCore, Request, SamplingParams, SpeculationConfig
from workers.engine.models.executor import LoadedModel
from workers.engine.models.loading.load import load_model

PROMPTS_BY_BATCH = {1: 3, 8: 24, 64: 128}
TOKENS = 128
METHODS = {
    "ngram": SpeculationConfig(method="ngram"),
    "suffix": SpeculationConfig(method="suffix"),
    "int8 copy": SpeculationConfig(method="draft_model", draft="target", draft_dtype="int8"),
}
POLICIES = ("auto", "threshold", "fixed")


def run(repeats: int) -> None:
    print(f"\nspeculation: tokens/s by those of plain decoding, bfloat16, greedy, {TOKENS} tokens each; {describe()}")
    model = load_model(EngineConfig(target=MODEL, dtype="bfloat16", max_model_len=1024))
    for batch in PROMPTS_BY_BATCH:
        with foreign_load() as load:
            rates = _rates(model, batch, repeats)
        print(f"  batch {batch}, {repeats} paired runs; other processes kept {load.foreign_cores:.2f} cores busy")
        for (method, policy), measured in rates.items():
            if method != "none":
                ratio = spread(paired(measured, rates["none", ""]))
                print(f"    {method:<10} {policy:<10} {ratio}", flush=True)


def _rates(model: LoadedModel, batch: int, repeats: int) -> dict[tuple[str, str], list[float]]:
    """tokens/s, run by run. The first round warms up, and is what `auto` learns from in a long job."""
    cores = {("none", ""): _core(model, batch, SpeculationConfig())}
    for method, speculation in METHODS.items():
        cores |= {(method, policy): _core(model, batch, replace(speculation, policy=policy)) for policy in POLICIES}
    encoded = [chat_ids(model.tokenizer, PROMPTS[n % len(PROMPTS)]) for n in range(PROMPTS_BY_BATCH[batch])]
    rates: dict[tuple[str, str], list[float]] = {key: [] for key in cores}
    for number in range(repeats + 1):
        for key, core in cores.items():
            rate = _tokens_per_second(core, encoded, number)
            if number:
                rates[key].append(rate)
    return rates


def _core(model: LoadedModel, batch: int, speculation: SpeculationConfig) -> EngineCore:
    config = EngineConfig(
        target=MODEL, dtype="bfloat16", max_batch=batch, max_model_len=1024, kv_memory=2**28, speculation=speculation
    )
    return EngineCore(config, model=model)


def _tokens_per_second(core: EngineCore, encoded: list[list[int]], number: int) -> float:
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    for index, ids in enumerate(encoded):
        core.add(Request((number, index), ids, params, scope=f"round {number}"))
    started, tokens = time.perf_counter(), 0
    while core.has_work:
        tokens += sum(len(completion.token_ids) for completion in core.step())
    return tokens / (time.perf_counter() - started)
