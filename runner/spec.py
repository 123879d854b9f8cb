"""The job spec: one model for job files, flags and the `jobs.spec` column.

Ranges are defined once, in the frozen dataclasses of each section (`InputSpec`, `EngineConfig`, `SpeculationConfig`,
`SamplingParams`); this module converts into them, so what one of
them refuses is refused here, with the same message.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, asdict, fields
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, field_validator, model_validator
from pydantic import Field as SpecField

from runner.errors import SpecError
from storage.records import InputSpec
from workers.engine.config import EngineConfig, SpeculationConfig
from workers.engine.errors import EngineError
from workers.engine.sampling_params import SamplingParams
from workers.suggest import did_you_mean

INPUT_KEYS = tuple(f.name for f in fields(InputSpec))
ENGINE_KEYS = tuple(f.name for f in fields(EngineConfig))
SPECULATION_KEYS = tuple(f.name for f in fields(SpeculationConfig))
SAMPLING_KEYS = tuple(f.name for f in fields(SamplingParams))

_Config = TypeVar("_Config")


def _paths(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class InputSection(BaseModel):
    """`input`: see `storage.records.InputSpec`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    paths: Annotated[list[str], BeforeValidator(_paths), SpecField(min_length=1)]
    prompt_column: str | None = None
    messages_column: str | None = None
    id_column: str | None = None
    sampling_column: str | None = None
    speculation_column: str | None = None
    limit: Annotated[int, SpecField(ge=0)] | None = None


class JobSpec(BaseModel):
    """One job: what is read, which engine answers, how it samples. `to_dict` is what `jobs.spec` stores."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: Annotated[str, SpecField(min_length=1)] | None = None
    """None derives one from the input and the rest of the spec (`runner.names`)."""
    input: InputSection
    engine: dict[str, Any]
    """Every field of `EngineConfig`, `speculation` being every field of `SpeculationConfig`."""
    sampling: dict[str, Any] = SpecField(default_factory=dict, validate_default=True)
    """Every field of `SamplingParams`; `bad_words` are strings."""
    seed: Annotated[int, SpecField(ge=0, lt=2**63)] = 0
    """A row without a seed of its own gets one from this, its index and its sample."""
    system_prompt: str | None = None
    chat_template: bool | None = None
    """None: used when the tokenizer has one; false: the prompt text goes in as it is."""
    chunk_rows: Annotated[int, SpecField(ge=1)] | None = None
    max_error_rate: Annotated[float, SpecField(ge=0.0, le=1.0, strict=False)] | None = None
    """The job fails early when more than this share of the finished rows are errors."""
    keep_token_ids: bool = False
    max_attempts: Annotated[int, SpecField(ge=1)] = 3
    """Times a chunk may lose its worker before it is split to find the row that kills it."""
    lease_seconds: Annotated[float, SpecField(ge=1.0, strict=False)] = 60.0

    @field_validator("engine", mode="before")
    @classmethod
    def _engine(cls, value: Any) -> dict[str, Any]:
        return asdict(engine_config(value))

    @field_validator("sampling", mode="before")
    @classmethod
    def _sampling(cls, value: Any) -> dict[str, Any]:
        section = known_keys(value, SAMPLING_KEYS, "sampling")
        bad_words = section.pop("bad_words", None) or []
        if not isinstance(bad_words, list) or not all(isinstance(word, str) and word for word in bad_words):
            raise SpecError(f"sampling.bad_words must be a list of non-empty strings, got {bad_words!r}")
        params = asdict(_build(SamplingParams, section, "sampling"))
        return {
            **params,
            "bad_words": bad_words,
            "stop": list(params["stop"]),
            "stop_token_ids": list(params["stop_token_ids"]),
            "logit_bias": {str(token): bias for token, bias in params["logit_bias"].items()},
        }

    @model_validator(mode="after")
    def _one_text_column(self) -> Self:
        if self.input.prompt_column and self.input.messages_column:
            raise SpecError(
                f"input has both prompt_column {self.input.prompt_column!r} and messages_column "
                f"{self.input.messages_column!r}; a row's text comes from one of them"
            )
        return self

    def to_dict(self) -> dict[str, Any]:
        """JSON values only, every default written out, so that a stored spec means the same in a later version."""
        return self.model_dump(mode="json")

    def input_spec(self) -> InputSpec:
        """The input section as the scheduler takes it."""
        return InputSpec(**{**self.input.model_dump(), "paths": tuple(self.input.paths)})

    def engine_config(self) -> EngineConfig:
        """The engine section as the engine takes it."""
        return engine_config(self.engine)


def parse_spec(data: Mapping[str, Any]) -> JobSpec:
    """Build a spec from the sections of a job file. Raises `SpecError`, naming the key."""
    top = known_keys(data, tuple(JobSpec.model_fields), "the job spec")
    if "input" not in top:
        raise SpecError("input is missing: name the Parquet files that are read (input.paths)")
    top["input"] = known_keys(top["input"], INPUT_KEYS, "input")
    if "engine" not in top:
        raise SpecError("engine is missing: name the model that answers (engine.target)")
    try:
        return JobSpec.model_validate(top)
    except ValidationError as error:
        raise SpecError("; ".join(_one_line(problem) for problem in error.errors())) from error


def default_spec() -> dict[str, Any]:
    """Every field of a stored spec with its default; the input and the target, which have none, are "-"."""
    return parse_spec({"input": {"paths": ["-"]}, "engine": {"target": "-"}}).to_dict()


def engine_config(value: Any) -> EngineConfig:
    """`EngineConfig` from its section of a spec. Raises `SpecError` for an unknown key, a wrong type or a bad value."""
    section = known_keys(value, ENGINE_KEYS, "engine")
    if "target" not in section:
        raise SpecError("engine.target is missing: name the model that answers")
    where = "engine.speculation"
    speculation = known_keys(section.pop("speculation", None) or {}, SPECULATION_KEYS, where)
    if "row_methods" in speculation:
        speculation["row_methods"] = row_methods(speculation)
    _check_types(SpeculationConfig, speculation, where)
    _check_types(EngineConfig, section, "engine")
    return _build(EngineConfig, {**section, "speculation": _build(SpeculationConfig, speculation, where)}, "engine")


def row_methods(speculation: Mapping[str, Any]) -> list[Any]:
    """`row_methods` of that section; one name is a list of one. Raises `SpecError` for what is no list."""
    value = speculation.get("row_methods")
    if value is not None and not isinstance(value, str | list | tuple):
        raise SpecError(f"engine.speculation.row_methods must be a list of methods, got {value!r}")
    return [value] if isinstance(value, str) else list(value or ())


def require_known_keys(spec: Mapping[str, Any]) -> None:
    """Raise `SpecError` for an unknown key anywhere, ahead of what a mistyped one leaves missing."""
    known_keys(spec, tuple(JobSpec.model_fields), "the job spec")
    engine = known_keys(spec.get("engine") or {}, ENGINE_KEYS, "engine")
    known_keys(engine.get("speculation") or {}, SPECULATION_KEYS, "engine.speculation")
    known_keys(spec.get("input") or {}, INPUT_KEYS, "input")
    known_keys(spec.get("sampling") or {}, SAMPLING_KEYS, "sampling")


def known_keys(value: Any, known: tuple[str, ...], where: str) -> dict[str, Any]:
    """`value` as a dict with known keys only. Raises `SpecError` with the nearest known key."""
    if not isinstance(value, Mapping):
        raise SpecError(f"{where} must be a mapping of keys to values, got {value!r}")
    for key in value:
        if key not in known:
            near = did_you_mean(str(key).replace("-", "_"), known)
            raise SpecError(f"unknown key {key!r} in {where}{near or '; known keys: ' + ', '.join(sorted(known))}")
    return dict(value)


def _build(config: type[_Config], section: Mapping[str, Any], where: str) -> _Config:
    """Build a section's dataclass, and name the section in what it refuses."""
    try:
        return config(**section)
    except EngineError as error:
        raise SpecError(f"{where}: {error}") from error


def _check_types(config: type, section: Mapping[str, Any], where: str) -> None:
    """The config classes check ranges, not types: YAML's `max_batch: "8"` is refused here."""
    for item in fields(config):
        if item.name in section and not _has_type(section[item.name], item):
            raise SpecError(f"{where}.{item.name} must be {item.type}, got {section[item.name]!r}")


_SCALARS = {"int": int, "float": (int, float), "bool": bool, "str": str}


def _has_type(value: Any, item: Field[Any]) -> bool:
    names = [part.strip() for part in str(item.type).split("|")]
    if value is None:
        return "None" in names
    wanted = next(name for name in names if name != "None")
    if wanted not in _SCALARS:
        return True
    if isinstance(value, bool):
        return wanted == "bool"
    return isinstance(value, _SCALARS[wanted])  # type: ignore[arg-type]


def _one_line(problem: Any) -> str:
    where = ".".join(str(part) for part in problem["loc"]) or "the job spec"
    return f"{where}: {problem['msg']}" + (f", got {problem['input']!r}" if "input" in problem else "")
