"""What makes a good draft, measured for one target and one way of drafting on the user's prompts.

Plain decoding and speculation run in the same process on the same requests, in turn, so that what slows the machine
slows both. Acceptance is counted in a pass of its own over all prompts; then each batch size is timed.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from statistics import fmean, median

from workers.engine.api.config import EngineConfig, SpeculationConfig
from workers.engine.api.errors import InvalidConfig
from workers.engine.api.request import Request
from workers.engine.api.sampling_params import SamplingParams
from workers.engine.core import EngineCore
from workers.engine.measure.acceptance import AcceptanceCounts
from workers.engine.measure.race import Run, race
from workers.engine.measure.report import BatchReport, DraftReport, judge
from workers.engine.models.executor import LoadedModel
from workers.engine.models.loading.load import load_model
from workers.engine.speculators.speculator import Speculator, SpeculatorContext, make_speculators

__all__ = ["AcceptanceCounts", "BatchReport", "DraftReport", "check_draft"]

COUNTING_BATCH = 8
"""Sequences at a time while acceptance is counted: always as many, since `suffix` learns from those that are done."""
FULL_STEPS = 32
"""Steps with a full batch that make a time."""
WARM_UP_TOKENS = 8


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

    Prompts are token ids. Each is counted once; each batch size is timed over all of them, and over copies as well
    where the batch needs more. While steps with a full batch are few, that is repeated with more copies, `repeats`
    times in all at most. `params` (default: greedy) says how prompts are sampled, but for max_tokens.

    Raises `InvalidConfig` when there is nothing to compare, or a prompt cannot run; and what loading raises.
    """
    if config.speculation.method == "none" or not prompts or not batch_sizes:
        raise InvalidConfig("check-draft compares a way of drafting with none: give a method, prompts and batches")
    params = replace(params or SamplingParams(temperature=0.0), max_tokens=max_tokens)
    bench = _Bench(config, prompts, max(*batch_sizes, COUNTING_BATCH), params, model)
    counts = bench.count()
    return bench.report(counts, [bench.measure(batch, repeats) for batch in batch_sizes])


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
        longest = max(map(len, prompts)) + params.max_tokens + 1
        blocks = largest * -(-(longest + 64) // config.block_size)
        speculation = replace(config.speculation, policy="fixed")
        sized = replace(config, max_batch=largest, kv_blocks=blocks, speculation=speculation)
        self._model = model or load_model(config)
        self._drafters: dict[str, Speculator] = {}
        self._plain = EngineCore(replace(sized, speculation=SpeculationConfig()), model=self._model)
        self._drafting = EngineCore(sized, model=self._model, make=self._make)
        self._speculation = self._drafting.config.speculation
        self._races = 0
        self._identical = True

    def _make(self, context: SpeculatorContext) -> Mapping[str, Speculator]:
        self._drafters = make_speculators(context)
        return self._drafters

    def count(self) -> AcceptanceCounts:
        """Every prompt once."""
        _, drafting = self._race(COUNTING_BATCH, 1, self._params)
        return AcceptanceCounts.of(drafting.stats)

    def measure(self, batch: int, repeats: int) -> BatchReport:
        """Both ways in turn, after a few tokens that warm up."""
        copies = -(-batch // len(self._prompts))
        tokens = min(WARM_UP_TOKENS, self._params.max_tokens)
        self._race(batch, copies, replace(self._params, max_tokens=tokens, min_tokens=0))
        races: list[tuple[Run, Run]] = []
        while len(races) < repeats and min(_full_steps(races)) < FULL_STEPS:
            races.append(self._race(batch, copies << len(races), self._params))
        if not min(_full_steps(races)):
            raise InvalidConfig(f"batch {batch}: no step in which all decode; ask for more tokens or shorter prompts")
        return self._compare(batch, races)

    def _race(self, batch: int, copies: int, params: SamplingParams) -> tuple[Run, Run]:
        """Plain decoding and speculation on the prompts, `copies` times over.

        Copies are scopes of their own, so none drafts from the answer of another, or of an earlier race.
        """
        self._races += 1
        requests = [
            Request((copy, index), prompt, params, sample=index, scope=(self._races, copy))
            for copy in range(copies)
            for index, prompt in enumerate(self._prompts)
        ]
        plain, drafting = Run(self._plain, requests, batch), Run(self._drafting, requests, batch)
        race(plain, drafting)
        self._identical &= all(
            completion.token_ids == plain.done[key].token_ids for key, completion in drafting.done.items()
        )
        return plain, drafting

    def _compare(self, batch: int, races: Seq[tuple[Run, Run]]) -> BatchReport:
        plain, drafting = [plain for plain, _ in races], [drafting for _, drafting in races]
        steps = [seconds for run in drafting for seconds in run.steps]
        drafts = [seconds for run in drafting for seconds in run.drafting]
        step, whole = fmean(seconds for run in plain for seconds in run.steps), fmean(steps)
        draft_pass = median(drafts) / self._speculation.depth
        stats = [one for run in drafting for one in run.stats]
        tokens_per_step = sum(one.emitted for one in stats) / sum(one.steps for one in stats)
        return BatchReport(
            batch=batch,
            requests=len(stats),
            tokens_per_step=tokens_per_step,
            plain_steps=sum(len(run.steps) for run in plain),
            drafting_steps=len(steps),
            plain_step=step,
            draft_pass=draft_pass,
            verify_step=whole - fmean(drafts),
            speed_ratio=step / max(draft_pass, 1e-9),
            predicted_speedup=tokens_per_step * step / whole,
            measured_speedup=_tokens_per_second(drafting) / _tokens_per_second(plain),
        )

    def report(self, counts: AcceptanceCounts, batches: Seq[BatchReport]) -> DraftReport:
        speculation, model = self._speculation, self._model
        drafter = self._drafters[speculation.method]
        vocabulary = drafter.vocabulary
        weights = drafter.draft.weight_bytes if drafter.draft else 0
        kv = drafter.cache.shape.bytes_per_token() if drafter.cache else 0
        shape, target_weights = model.facts.cache_shape, model.executor.weight_bytes
        return DraftReport(
            method=speculation.method,
            target=model.name,
            draft=speculation.draft,
            identical=self._identical,
            counts=counts,
            vocabulary=vocabulary.kind,
            vocabulary_overlap=vocabulary.overlap,
            target_weight_bytes=target_weights,
            draft_weight_bytes=weights,
            target_kv_bytes_per_token=shape.bytes_per_token(),
            draft_kv_bytes_per_token=kv,
            draft_hidden_bytes_per_token=len(drafter.hidden_layers) * shape.hidden_size * shape.dtype.itemsize,
            batches=tuple(batches),
            depth=speculation.depth,
            rules=judge(counts, batches[0].speed_ratio, weights / max(1, target_weights), vocabulary.coverage),
        )


def _full_steps(races: Seq[tuple[Run, Run]]) -> tuple[int, int]:
    """Steps with a full batch, of both ways."""
    return sum(len(plain.steps) for plain, _ in races), sum(len(drafting.steps) for _, drafting in races)


def _tokens_per_second(runs: Seq[Run]) -> float:
    return sum(run.emitted for run in runs) / sum(run.seconds for run in runs)
