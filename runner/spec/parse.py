"""From what a user gave, job file and flags, to a `JobSpec`: everything that is wrong is named at once.

Types and ranges are defined once, at the fields of each section (`JobSpec`, `InputSpec`, `EngineConfig`,
`SpeculationConfig`, `SamplingParams`); whatever any of them refuses is refused here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from typing import Any, TypeVar

from runner.errors import SpecError
from scheduler.errors import InvalidJob
from scheduler.intake.naming import check_name
from storage.errors import RefusedSpec
from storage.spec import InputSpec, JobSpec
from storage.suggest import did_you_mean, nearest
from workers.engine.api.config import EngineConfig, SpeculationConfig
from workers.engine.api.errors import Refused
from workers.engine.api.sampling_params import SamplingParams

JOB_KEYS = tuple(f.name for f in fields(JobSpec))
INPUT_KEYS = tuple(f.name for f in fields(InputSpec))
ENGINE_KEYS = tuple(f.name for f in fields(EngineConfig))
SPECULATION_KEYS = tuple(f.name for f in fields(SpeculationConfig))
SAMPLING_KEYS = tuple(f.name for f in fields(SamplingParams))

SPECULATION = "engine.speculation"
NO_INPUT = "input.paths is missing: name the Parquet files that are read"
NO_TARGET = "engine.target is missing: name the model that answers"

_Config = TypeVar("_Config")


def parse_spec(data: Mapping[str, Any], no_target: str = NO_TARGET) -> JobSpec:
    """Build a spec from the sections of a job file; one that is null counts as not given.

    Raises `SpecError`, which names everything that is wrong. `no_target` is what it says where no model is named.
    """
    problems: list[str] = []
    values = _known(data, JOB_KEYS, "", problems)
    values["input"] = _input(values.get("input"), problems)
    values["engine"] = asdict(_engine(values.get("engine"), no_target, problems))
    values["sampling"] = _sampling(values.get("sampling"), problems)
    spec = _validated(values, problems)
    if spec is None or problems:
        raise SpecError(*problems)
    return spec


def default_spec() -> JobSpec:
    """Every field of a stored spec with its default; the input and the target, which have none, are "-"."""
    return parse_spec({"input": {"paths": ["-"]}, "engine": {"target": "-"}})


def row_methods(speculation: Mapping[str, Any]) -> list[Any]:
    """`row_methods` of that section; one name is a list of one, and what is no list at all is none."""
    value = speculation.get("row_methods")
    return [value] if isinstance(value, str) else list(value) if isinstance(value, list | tuple) else []


def _input(value: Any, problems: list[str]) -> dict[str, Any]:
    section = _known(value, INPUT_KEYS, "input", problems)
    _require(section, "paths", NO_INPUT, value, problems)
    if section.get("prompt_column") and section.get("messages_column"):
        problems.append(
            f"input has both prompt_column {section['prompt_column']!r} and messages_column "
            f"{section['messages_column']!r}; a row's text comes from one of them"
        )
    return section


def _engine(value: Any, no_target: str, problems: list[str]) -> EngineConfig:
    section = _known(value, ENGINE_KEYS, "engine", problems)
    _require(section, "target", no_target, value, problems)
    speculation = _known(section.pop("speculation", None), SPECULATION_KEYS, SPECULATION, problems)
    if isinstance(speculation.get("row_methods"), str):
        speculation["row_methods"] = row_methods(speculation)
    section["speculation"] = _built(SpeculationConfig, speculation, SPECULATION, problems) or SpeculationConfig()
    return _built(EngineConfig, section, "engine", problems) or EngineConfig("-")


def _sampling(value: Any, problems: list[str]) -> dict[str, Any]:
    section = _known(value, SAMPLING_KEYS, "sampling", problems)
    bad_words = section.pop("bad_words", None) or []
    if not isinstance(bad_words, list) or not all(isinstance(word, str) and word for word in bad_words):
        problems.append(f"sampling.bad_words must be a list of non-empty strings, got {bad_words!r}")
    params = _built(SamplingParams, section, "sampling", problems) or SamplingParams()
    return {**asdict(params), "bad_words": bad_words}


def _known(value: Any, known: tuple[str, ...], section: str, problems: list[str]) -> dict[str, Any]:
    """The known keys of a section. A mistyped one is named, and read as the key that it is nearest to, so that nothing
    is called missing or contradictory because of it."""
    where = section or "the job spec"
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        problems.append(f"{where} must be a mapping of keys to values, got {value!r}")
        return {}
    found = {key: item for key, item in value.items() if key in known}
    for key in value:
        if key not in known:
            word = str(key).replace("-", "_")
            near = did_you_mean(word, known) or "; known keys: " + ", ".join(sorted(known))
            problems.append(f"unknown key {key!r} in {where}{near}")
            found.setdefault(nearest(word, known) or key, value[key])
    return {key: item for key, item in found.items() if key in known}


def _require(section: dict[str, Any], key: str, missing: str, given: Any, problems: list[str]) -> None:
    """Put something in the place of a key that is not there, to go on with the others."""
    if key not in section:
        section[key] = "-"
        if given is None or isinstance(given, Mapping):
            problems.append(missing)


def _built(config: type[_Config], values: Mapping[str, Any], section: str, problems: list[str]) -> _Config | None:
    """The options of a section; None when they are refused."""
    try:
        return config(**values)
    except Refused as refused:
        problems += [_placed(problem, section, values) for problem in refused.problems]
        return None


def _placed(problem: str, section: str, keys: Iterable[str]) -> str:
    """A sentence about an option, which begins with its name, as one about the key that holds it."""
    return f"{section}.{problem}" if problem.partition(" ")[0].rstrip(":") in keys else f"{section}: {problem}"


def _validated(values: dict[str, Any], problems: list[str]) -> JobSpec | None:
    name = values.get("name")
    if isinstance(name, str):
        try:
            check_name(name)
        except InvalidJob as error:
            problems.append(str(error))
            values.pop("name")
    try:
        return JobSpec.parse(values)
    except RefusedSpec as error:
        problems += error.problems
        return None
