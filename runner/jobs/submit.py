"""From a spec to a job in the store: the input is checked before anything is recorded or loaded."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from runner.jobs.row_methods import with_row_methods
from runner.output.console import note
from runner.spec.parse import default_spec
from scheduler.intake.dataset import inspect
from scheduler.intake.submission import submit
from storage.records import JobState
from storage.spec import JobSpec
from workers.engine.api.errors import InvalidConfig, ModelNotFound, NoSkipSet, PromptTooLong
from workers.engine.api.request import Request
from workers.engine.api.sampling_params import SamplingParams
from workers.engine.speculators.self.skip_file import SkipFile, a_file_decides
from workers.rows.prompts import PromptRenderer, require_sense
from workers.rows.settings import engine_config, sampling_params, with_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from scheduler.intake.submission import Submission
    from storage.records import Job
    from storage.store.store import Store
    from workers.engine.api.config import EngineConfig
    from workers.engine.measure.preflight import Preflight


LOSSY = "typical"
"""The verification rule that changes the distribution of the answers."""


def warn_if_lossy(config: EngineConfig) -> None:
    """Say that a verification rule changes what the model would answer, if it does."""
    if config.speculation.verify == LOSSY:
        note(
            f"warning: verify {LOSSY} is lossy: the answers are not distributed as the target's own. The stored method"
            f" of every row ends in /{LOSSY}; docs/verification.md has the rules that keep the distribution"
        )


def warn_of_remote_code(config: EngineConfig) -> None:
    """Say that code which comes with the models will run, if it may."""
    if config.trust_remote_code:
        note(
            "warning: engine.trust_remote_code is set: Python code that comes with the target or its draft runs on"
            " every worker which allows that, with all that the worker's user may do"
        )


def submit_job(store: Store, spec: JobSpec, *, new: bool = False, models_here: bool = False) -> Submission:
    """Inspect the input and record the job, or find the one that it repeats.

    `models_here`: this machine will run it, so its models must be found and fit each other as well; paths of a job for
    other machines mean nothing here. What a file of this machine decides, the skip set of method self, becomes part of
    the stored spec: every worker skips the same, whatever was calibrated where it runs.

    Raises `InvalidInput`, `InvalidJob`, `SpecChanged`, `InputChanged`, `WrongState`, `InvalidConfig`, `InvalidSpec`
    when no row's text could be made, and with `models_here` what `Preflight` raises, each naming what is wrong.
    """
    spec, dataset = with_row_methods(spec, inspect(spec.input))
    for remark in dataset.notes:
        note(f"note: {remark}")
    config = engine_config(spec)
    warn_if_lossy(config)
    warn_of_remote_code(config)
    known = None if new or spec.name is None else store.jobs.find(spec.name)
    complete = known is not None and known.state is JobState.COMPLETED
    require_sense(spec)
    settle = partial(_for_this_machine, spec) if models_here and not complete else _for_any_machine
    spec = with_engine(spec, _settled(config, known, settle))
    return submit(store, spec, dataset, new=new, defaults=default_spec())


def _settled(config: EngineConfig, known: Job | None, settle: Callable[[EngineConfig], EngineConfig]) -> EngineConfig:
    """The engine with the skip set that a file decides. A job that is there already has its own, and needs no file."""
    try:
        return settle(config)
    except NoSkipSet as error:
        skip = engine_config(known.spec).speculation.skip if known else None
        if known is None or skip is None:
            raise
        note(f"{error}; job {known.name} goes on with the skip set that it was submitted with")
        return settle(_skipping(config, skip))


def _for_this_machine(spec: JobSpec, config: EngineConfig) -> EngineConfig:
    from workers.engine.measure.preflight import Preflight

    engine = Preflight(config)
    PromptRenderer(spec, engine.tokenizer)
    _require_room(spec, engine)
    return engine.config


def _require_room(spec: JobSpec, engine: Preflight) -> None:
    """Raise `InvalidConfig` when the KV cache is too small for any row of the job. Rows with parameters of their own
    may ask for less."""
    if spec.input.sampling_column is not None:
        return
    shortest = Request("", [0], SamplingParams(max_tokens=sampling_params(spec).max_tokens))
    try:
        engine.check(shortest)
    except PromptTooLong as error:
        raise InvalidConfig(f"no row of this job can run, not even one of a single token: {error}") from error


def _for_any_machine(config: EngineConfig) -> EngineConfig:
    if not a_file_decides(config.speculation):
        return config
    from workers.engine.measure.preflight import with_calibrated_skip_set

    try:
        return with_calibrated_skip_set(config)
    except ModelNotFound as error:
        return _without_target(config, error)


def _without_target(config: EngineConfig, error: ModelNotFound) -> EngineConfig:
    path = config.speculation.skip_file
    if path is None:
        raise NoSkipSet(
            "method self: what is skipped is settled when a job is submitted, by what was calibrated for the target's "
            f"weights, which are not here ({error}): set skip or exit_layer, name in skip_file what `nightdraft "
            "calibrate --out` wrote, or submit the job where the target was calibrated"
        ) from error
    found = SkipFile.read(path)
    note(
        f"warning: skip_file {path} was calibrated for {found.target} ({found.content_hash[:12]}); whether the target "
        f"{config.target} of the workers is that one cannot be told here"
    )
    return _skipping(config, found.skip)


def _skipping(config: EngineConfig, skip: Iterable[str]) -> EngineConfig:
    return replace(config, speculation=replace(config.speculation, skip=tuple(skip), skip_file=None))
