"""Plain decoding against transformers' generate: same model, prompts, precision and greedy tokens, in turn."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks.machine import describe, foreign_load
from benchmarks.ratios import paired, spread

BATCHES, PROMPTS, TOKENS = (64, 1), 64, 128


@dataclass(slots=True)
class _Rates:
    """tokens/s, run by run."""

    loaded: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)


def run(repeats: int) -> None:
    print(f"decoding: {TOKENS} tokens each, bfloat16, greedy, EOS ignored; {describe()}")
    for batch in BATCHES:
        rates = {"nightdraft": _Rates(), "transformers": _Rates()}
        with foreign_load() as load:
            for _ in range(repeats):
                for engine, measured in rates.items():
                    _measure(engine, batch, measured)
        _report(batch, rates["nightdraft"], rates["transformers"], load.foreign_cores)


def _measure(engine: str, batch: int, rates: _Rates) -> None:
    command = [sys.executable, "-m", "benchmarks.decode_once", engine, "--batch", str(batch), "--prompts", str(PROMPTS)]
    command += ["--tokens", str(TOKENS)]
    started = time.perf_counter()
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    elapsed = time.perf_counter() - started
    rates.last = json.loads(output.splitlines()[-1])
    rates.loaded.append(rates.last["tokens"] / rates.last["seconds"])
    rates.whole.append(rates.last["tokens"] / elapsed)


def _report(batch: int, ours: _Rates, theirs: _Rates, foreign: float) -> None:
    print(f"\nbatch {batch}, {PROMPTS} prompts, {len(ours.loaded)} paired runs; median (min to max)")
    print(f"  nightdraft / transformers, model loaded    {spread(paired(ours.loaded, theirs.loaded))}")
    print(f"  nightdraft / transformers, whole process   {spread(paired(ours.whole, theirs.whole))}")
    print(f"  tokens/s, model loaded: nightdraft {spread(ours.loaded, 0)}, transformers {spread(theirs.loaded, 0)}")
    print(f"  other processes kept {foreign:.2f} cores busy")
    steps, parts = ours.last["steps"], ours.last["parts"]
    total = sum(parts.values())
    print(f"  a step: {1000 * ours.last['seconds'] / steps:.2f} ms, of which")
    for part, seconds in sorted(parts.items(), key=lambda item: -item[1]):
        print(f"    {part:<10} {1000 * seconds / steps:8.3f} ms  {seconds / total:6.1%}")
