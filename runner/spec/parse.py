"""The job spec: one model for job files, flags and the `jobs.spec` column.

Ranges are defined once, in the frozen dataclasses of each section (`EngineConfig`, `SpeculationConfig`,
`SamplingParams`) and in the models below; whatever any of them refuses is refused here, all of it at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic import Field as SpecField

from runner.errors import SpecError
from scheduler.errors import InvalidJob
from scheduler.intake.naming import check_name
from storage.records import InputSpec
from storage.suggest import did_you_mean, nearest
from workers.engine.api.config import EngineConfig, SpeculationConfig
from workers.engine.api.errors import Refused
from workers.engine.api.sampling_params import SamplingParams

INPUT_KEYS = tuple(f.name for f in fields(InputSpec))
ENGINE_KEYS = tuple(f.name for f in fields(EngineConfig))
SPECULATION_KEYS = tuple(f.name for f in fields(SpeculationConfig))
SAMPLING_KEYS = tuple(f.name for f in fields(SamplingParams))

SPECULATION = "engine.speculation"
NO_INPUT = "input.paths is missing: name the Parquet files that are read"
NO_TARGET = "engine.target is missing: name the model that answers"

_Config = TypeVar("_Config")


def _paths(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class InputSection(BaseModel):
    """`input`: see `storage.records.InputSpec`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    paths: Annotated[list[str], BeforeValidator(_paths), SpecField(min_length=1)]
    prompt_column: str | None = None
    messages_column: str | None = None
    id_column: str | None = None
    sampling_column: str | None = None
    speculation_column: str | None = None
    limit: Annotated[int, SpecField(ge=0)] | None = None


class JobSpec(BaseModel):
    """One job: what is read, which engine answers, how it samples. `to_dict` is what `jobs.spec` stores."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    name: str | None = None
    """None derives one from the input and the rest of the spec (`runner.spec.names`)."""
    input: InputSection
    engine: dict[str, Any]
    """Every field of `EngineConfig`, `speculation` being every field of `SpeculationConfig`."""
    sampling: dict[str, Any]
    """Every field of `SamplingParams`; `bad_words` are strings."""
    seed: Annotated[int, SpecField(ge=0, lt=2**63)] = 0
    """A row without a seed of its own gets one from this, its index and its sample."""
    system_prompt: str | None = None
    chat_template: bool | None = None
    """None: used when the tokenizer has one; false: the prompt text goes in as it is."""
    special_tokens_in_content: Literal["text", "parse"] = "text"
    """What messages spell of control tokens: text like any other, or these tokens."""
    chunk_rows: Annotated[int, SpecField(ge=1)] | None = None
    max_error_rate: Annotated[float, SpecField(ge=0.0, le=1.0)] | None = None
    """The job fails early when more than this share of the finished rows are errors."""
    keep_token_ids: bool = False
    max_attempts: Annotated[int, SpecField(ge=1)] = 3
    """Times a chunk may lose its worker before it is split to find the row that kills it."""
    lease_seconds: Annotated[float, SpecField(ge=1.0)] = 60.0

    def to_dict(self) -> dict[str, Any]:
        """JSON values only, every default written out, so that a stored spec means the same in a later version."""
        return self.model_dump(mode="json")

    def input_spec(self) -> InputSpec:
        """The input section as the scheduler takes it."""
        return InputSpec(**{**self.input.model_dump(), "paths": tuple(self.input.paths)})

    def engine_config(self) -> EngineConfig:
        """The engine section as the engine takes it."""
        speculation = SpeculationConfig(**self.engine["speculation"])
        return EngineConfig(**{**self.engine, "speculation": speculation})


def parse_spec(data: Mapping[str, Any], no_target: str = NO_TARGET) -> JobSpec:
    """Build a spec from the sections of a job file; one that is null counts as not given.

    Raises `SpecError`, which names everything that is wrong. `no_target` is what it says where no model is named.
    """
    problems: list[str] = []
    values = _known(data, tuple(JobSpec.model_fields), "", problems)
    values["input"] = _input(values.get("input"), problems)
    values["engine"] = asdict(_engine(values.get("engine"), no_target, problems))
    values["sampling"] = _sampling(values.get("sampling"), problems)
    spec = _validated(values, problems)
    if spec is None or problems:
        raise SpecError(*problems)
    return spec


def default_spec() -> dict[str, Any]:
    """Every field of a stored spec with its default; the input and the target, which have none, are "-"."""
    return parse_spec({"input": {"paths": ["-"]}, "engine": {"target": "-"}}).to_dict()


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
    params = asdict(_built(SamplingParams, section, "sampling", problems) or SamplingParams())
    return {
        **params,
        "bad_words": bad_words,
        "stop": list(params["stop"]),
        "stop_token_ids": list(params["stop_token_ids"]),
        "logit_bias": {str(token): bias for token, bias in params["logit_bias"].items()},
    }


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
        return JobSpec.model_validate(values)
    except ValidationError as error:
        problems += [_in_words(problem) for problem in error.errors()]
        return None


_WORDS = {
    "int_type": "must be an integer",
    "float_type": "must be a number",
    "finite_number": "must be a number",
    "bool_type": "must be true or false",
    "string_type": "must be text",
    "string_unicode": "must be text",
    "list_type": "must be a string or a list of strings",
    "too_short": "must not be empty",
    "greater_than_equal": "must be at least {ge:g}",
    "less_than_equal": "must be at most {le:g}",
    "less_than": "must be less than {lt}",
    "literal_error": "must be {expected}",
}
"""What pydantic finds wrong, in the words of the other sections."""


def _in_words(problem: Any) -> str:
    where = ".".join(str(part) for part in problem["loc"])
    return f"{where} {_WORDS[problem['type']].format(**problem.get('ctx', {}))}, got {problem['input']!r}"
