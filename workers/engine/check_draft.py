"""What makes a good draft, measured for one target and one way of drafting on the user's prompts.

Plain decoding and speculation run in the same process on the same requests, in turn, so that what slows the machine
slows both. A batch is timed only while all of its sequences decode: prompts are no part of a draft's worth.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from statistics import median

from workers.engine.config import EngineConfig, SpeculationConfig
from workers.engine.core import EngineCore
from workers.engine.errors import InvalidConfig
from workers.engine.kv_cache import KVCache
from workers.engine.models.executor import LoadedModel
from workers.engine.models.loading import load_model
from workers.engine.request import Completion, Request
from workers.engine.sampling_params import SamplingParams
from workers.engine.speculators.draft_model import DraftModelSpeculator
from workers.engine.speculators.speculator import Drafter, Speculator, SpeculatorContext, make_speculators
from workers.engine.speculators.speedup import expected_tokens

FASTER, ACCEPTED, SMALLER = 5.0, 0.7, 0.2


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of thumb for drafts, and how it went."""

    name: str
    wanted: str
    measured: float
    holds: bool


@dataclass(frozen=True, slots=True)
class BatchReport:
    """One batch size. Times are seconds per step, medians, while the whole batch decodes."""

    batch: int
    plain_step: float
    draft_pass: float
    """One level of a draft."""
    verify_step: float
    """A step with drafts, without the drafting."""
    speed_ratio: float
    """plain_step / draft_pass: how many times faster than the target the drafter is."""
    predicted_speedup: float
    """E / (g c + v): expected tokens of a step, by drafting and verifying in units of a plain step."""
    measured_speedup: float
    """Tokens per second by those of plain decoding, prompts included."""


@dataclass(frozen=True, slots=True)
class DraftReport:
    """What `check_draft` found. Acceptance counts are by depth of the draft, over all runs."""

    method: str
    target: str
    draft: str | None
    identical: bool
    """Whether both ways gave the same tokens, as they must under rule exact."""
    reached: tuple[int, ...]
    """Steps in which a token at this depth was put to the test, the ones above it being accepted."""
    accepted: tuple[int, ...]
    mean_acceptance_length: float
    vocabulary: str
    """same, mapped or text."""
    vocabulary_overlap: float
    target_weight_bytes: int
    draft_weight_bytes: int
    """Of weights that the draft keeps beside the target's."""
    target_kv_bytes_per_token: int
    draft_kv_bytes_per_token: int
    batches: tuple[BatchReport, ...]
    rules: tuple[Rule, ...]

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Conditional acceptance by depth."""
        return tuple(a / r if r else 0.0 for a, r in zip(self.accepted, self.reached, strict=True))

    @property
    def failed_rules(self) -> tuple[Rule, ...]:
        return tuple(rule for rule in self.rules if not rule.holds)


def check_draft(
    config: EngineConfig,
    prompts: Seq[Seq[int]],
    batch_sizes: Seq[int] = (1, 8, 32),
    max_tokens: int = 64,
    *,
    params: SamplingParams | None = None,
    repeats: int = 3,
    model: LoadedModel | None = None,
) -> DraftReport:
    """Measure `config.speculation` against plain decoding; its drafts always have their full length.

    Prompts are token ids, used again where a batch needs more of them. `params` (default: greedy) says how they are
    sampled, but for max_tokens. Raises `InvalidConfig` when there is nothing to compare, and what loading raises.
    """
    if config.speculation.method == "none" or not prompts or not batch_sizes:
        raise InvalidConfig("check-draft compares a way of drafting with none: give a method, prompts and batches")
    params = replace(params or SamplingParams(temperature=0.0), max_tokens=max_tokens)
    bench = _Bench(config, prompts, max(batch_sizes), params, model)
    reports = [bench.measure(batch, repeats) for batch in batch_sizes]
    return bench.report(reports)


@dataclass(slots=True)
class _Timing:
    """What one run of a batch took."""

    seconds: float = 0.0
    tokens: int = 0
    steps: list[float] = field(default_factory=list)
    """Of steps in which the whole batch decodes."""
    drafting: list[float] = field(default_factory=list)


class _Bench:
    """Two engines over the same weights."""

    def __init__(
        self,
        config: EngineConfig,
        prompts: Seq[Seq[int]],
        largest: int,
        params: SamplingParams,
        model: LoadedModel | None,
    ) -> None:
        self._prompts, self._params = prompts, params
        self._speculation = replace(config.speculation, policy="fixed")
        longest = max(map(len, prompts)) + params.max_tokens + 1
        blocks = largest * -(-(longest + 64) // config.block_size)
        sized = replace(config, max_batch=largest, kv_blocks=blocks, speculation=self._speculation)
        self._model = model or load_model(config)
        self._drafters: dict[str, Speculator] = {}
        self._plain = EngineCore(replace(sized, speculation=SpeculationConfig()), model=self._model)
        self._drafting = EngineCore(sized, model=self._model, make=self._make)
        self._reached: list[int] = []
        self._accepted: list[int] = []
        self._emitted, self._steps = 0, 0
        self._identical = True

    def _make(self, context: SpeculatorContext) -> Mapping[str, Speculator]:
        self._drafters = make_speculators(context)
        return self._drafters

    @property
    def acceptance(self) -> list[float]:
        return [a / r if r else 0.0 for a, r in zip(self._accepted, self._reached, strict=True)]

    def measure(self, batch: int, repeats: int) -> BatchReport:
        """Both ways in turn; the first round only warms up."""
        plain, drafting = [], []
        for _ in range(repeats + 1):
            expected, timing = self._run(self._plain, batch)
            plain.append(timing)
            found, timing = self._run(self._drafting, batch)
            drafting.append(timing)
            self._identical &= [c.token_ids for c in found] == [c.token_ids for c in expected]
        for completion in found:
            self._count(completion)
        return self._compare(batch, plain[1:], drafting[1:])

    def _compare(self, batch: int, plain: Seq[_Timing], drafting: Seq[_Timing]) -> BatchReport:
        step = median(second for timing in plain for second in timing.steps)
        whole = median(second for timing in drafting for second in timing.steps)
        draft = median(second for timing in drafting for second in timing.drafting)
        levels = self._drafting.config.speculation.depth
        speeds = [
            (after.tokens / after.seconds) / (before.tokens / before.seconds)
            for before, after in zip(plain, drafting, strict=True)
        ]
        return BatchReport(
            batch=batch,
            plain_step=step,
            draft_pass=draft / levels,
            verify_step=whole - draft,
            speed_ratio=step / max(draft / levels, 1e-9),
            predicted_speedup=expected_tokens(self.acceptance) * step / whole,
            measured_speedup=median(speeds),
        )

    def _run(self, core: EngineCore, batch: int) -> tuple[list[Completion], _Timing]:
        timing = _Timing()
        for index in range(batch):
            core.add(Request(index, self._prompts[index % len(self._prompts)], self._params))
        done: list[Completion] = []
        started = time.perf_counter()
        while core.has_work:
            decoding = not done and core.is_decoding
            before, drafted = time.perf_counter(), core.profile.seconds.get("draft", 0.0)
            done.extend(core.step())
            if decoding:
                timing.steps.append(time.perf_counter() - before)
                timing.drafting.append(core.profile.seconds["draft"] - drafted)
        timing.seconds = time.perf_counter() - started
        timing.tokens = sum(len(completion.token_ids) for completion in done)
        if not timing.steps:
            raise InvalidConfig(f"batch {batch}: no step in which all decode; ask for more tokens or shorter prompts")
        return sorted(done, key=lambda completion: str(completion.request_id)), timing

    def _count(self, completion: Completion) -> None:
        stats = completion.stats
        self._emitted += stats.emitted
        self._steps += stats.steps
        _add(self._reached, stats.reached_per_depth)
        _add(self._accepted, stats.accepted_per_depth)
        self._accepted.extend([0] * (len(self._reached) - len(self._accepted)))

    def report(self, batches: Seq[BatchReport]) -> DraftReport:
        speculation, target = self._speculation, self._model.executor
        drafter = self._drafters[speculation.method]
        weights, kv, vocabulary, overlap, coverage = 0, 0, "same", 1.0, 1.0
        if isinstance(drafter, DraftModelSpeculator):
            vocabulary = drafter.reading.kind
            if (both := drafter.reading.vocabulary) is not None:
                overlap, coverage = both.overlap, both.coverage
        if isinstance(drafter, Drafter) and drafter.draft is not None:
            weights = drafter.draft.weight_bytes
        cache = getattr(drafter, "cache", None)
        if isinstance(cache, KVCache):
            kv = cache.shape.bytes_per_token()
        return DraftReport(
            method=speculation.method,
            target=self._model.name,
            draft=speculation.draft,
            identical=self._identical,
            reached=tuple(self._reached),
            accepted=tuple(self._accepted),
            mean_acceptance_length=self._emitted / max(1, self._steps),
            vocabulary=vocabulary,
            vocabulary_overlap=overlap,
            target_weight_bytes=target.weight_bytes,
            draft_weight_bytes=weights,
            target_kv_bytes_per_token=target.cache_shape.bytes_per_token(),
            draft_kv_bytes_per_token=kv,
            batches=tuple(batches),
            rules=self._rules(batches[0], weights / max(1, target.weight_bytes), coverage),
        )

    def _rules(self, first: BatchReport, size: float, coverage: float) -> tuple[Rule, ...]:
        accepted = self.acceptance[0] if self._reached else 0.0
        return (
            Rule(
                "speed",
                f"a draft pass at least {FASTER:g} times as fast",
                first.speed_ratio,
                first.speed_ratio >= FASTER,
            ),
            Rule("acceptance", f"at least {ACCEPTED:.0%} of first tokens accepted", accepted, accepted >= ACCEPTED),
            Rule("size", f"at most {SMALLER:.0%} of the target's weights", size, size <= SMALLER),
            Rule("vocabulary", "all of the target's tokens", coverage, coverage >= 1.0),
        )


def _add(counts: list[int], new: Seq[int]) -> None:
    counts.extend([0] * (len(new) - len(counts)))
    for index, value in enumerate(new):
        counts[index] += value
