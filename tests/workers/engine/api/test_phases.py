"""A start that takes long says what it is at; and compiling, whenever it happens, is in no rate."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine.runs import engine, run
from tests.support.models.tiny import write_gguf
from workers.engine import EngineConfig, EngineCore, Request, SamplingParams, SpeculationConfig
from workers.engine.api import phases
from workers.engine.kernels.cpu import runtime
from workers.engine.kernels.cpu.runtime import TASKS, Kernel, claim, working_clock
from workers.engine.models.loading.load import load_model
from workers.engine.speculators.fixed import FixedSpeculator
from workers.engine.state.sequence import Sequence
from workers.engine.state.tree import EMPTY, DraftTree


@contextmanager
def watching() -> Iterator[list[str]]:
    """What goes on while the block runs, in order."""
    seen: list[str] = []
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.0002):
            now = phases.current()
            if now is not None and (not seen or seen[-1] != now):
                seen.append(now)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()
    assert phases.current() is None


def _count(block: Any) -> None:
    while claim(block) < block[TASKS]:
        pass


def test_loading_names_its_phases_and_leaves_nothing_to_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runtime._cache_folder()  # kernels stay where they are, which saves half a minute
    monkeypatch.setenv("NIGHTDRAFT_CACHE", str(tmp_path / "cache"))
    caplog.set_level("INFO")
    config = EngineConfig(target=str(write_gguf(tmp_path / "tiny.gguf")))
    with watching() as first:
        core = EngineCore(config)
    ours = [one.partition(":")[0] for one in first]
    places = [
        ours.index(one)
        for one in ("converting tiny.gguf (once on this machine)", "loading weights", "checking the model")
    ]
    assert places == sorted(places)
    assert "converting tiny.gguf took" in caplog.text
    with watching() as again:
        EngineCore(config)
    assert not [one for one in again if "converting" in one]
    compiled = time.perf_counter() - working_clock()
    requests = [Request(t, [5, 6, 7], SamplingParams(max_tokens=4, temperature=t, top_p=0.9)) for t in (0.0, 1.0)]
    run(core, requests)
    assert time.perf_counter() - working_clock() == pytest.approx(compiled, abs=1e-4)


def test_compiling_in_the_middle_of_a_step_is_a_phase_and_in_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_cache_folder", lambda: None)
    took: list[float] = []

    def propose(seq: Sequence, length: int) -> DraftTree:
        if not took:
            started = time.perf_counter()
            Kernel(_count).compile()
            took.append(time.perf_counter() - started)
        return EMPTY

    plain = engine()
    core = EngineCore(
        EngineConfig(plain.config.target, SpeculationConfig(method="ngram", policy="fixed")),
        model=load_model(plain.config),
        make=lambda context: {"ngram": FixedSpeculator(propose)},
    )
    with watching() as seen:
        done = run(core, [Request(0, b"hi", SamplingParams(max_tokens=3, ignore_eos=True))], check=False)
    assert any(one.startswith("compiling kernels (once on this machine)") for one in seen)
    timings = done[0].timings
    assert timings.draft + timings.verify < took[0] / 2, "three steps of a model that costs nothing"
    assert sum(core.profile.seconds.values()) < took[0] / 2


def test_progress_comes_from_another_library_s_bar() -> None:
    with phases.phase("converting") as converting:
        reader = phases.PercentReader(converting)
        for text in ("\rConverting: 12%|#  | 3/25", "\n", "\rConverting: 100%|###| 25/25"):
            print(text, file=reader, end="")
        assert phases.current() == "converting: 100%"
