"""The sections of a stored job spec that a worker needs, as typed values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from storage.records import InputSpec, Job
from storage.suggest import did_you_mean
from workers.engine.api.config import EngineConfig, SpeculationConfig
from workers.engine.api.errors import EngineError
from workers.errors import InvalidSpec


@dataclass(frozen=True, slots=True)
class JobSettings:
    """How this job's rows are read, prepared and answered. Made once for every chunk."""

    input: InputSpec
    engine: EngineConfig
    sampling: Mapping[str, Any]
    """The job's sampling parameters, before a row's own; `bad_words` are strings."""
    num_samples: int
    """Samples for each row (n)."""
    seed: int = 0
    keep_token_ids: bool = False
    lease_seconds: float = 60.0
    system_prompt: str | None = None
    chat_template: bool | None = None
    """None: used where the tokenizer has one; False: prompts go in as they are."""
    special_tokens_in_content: str = "text"
    """What messages spell of control tokens: "text", or "parse" to take it for them."""

    @classmethod
    def from_job(cls, job: Job) -> JobSettings:
        """Raises `InvalidSpec`, naming the section and the key."""
        spec = job.spec
        return cls(
            input=_input_spec(_section(spec, "input")),
            engine=engine_config(_section(spec, "engine")),
            sampling=_section(spec, "sampling"),
            num_samples=job.num_samples,
            seed=int(spec.get("seed") or 0),
            keep_token_ids=bool(spec.get("keep_token_ids", False)),
            lease_seconds=float(spec.get("lease_seconds") or 60.0),
            system_prompt=spec.get("system_prompt"),
            chat_template=spec.get("chat_template"),
            special_tokens_in_content=spec.get("special_tokens_in_content", "text"),
        )


def engine_config(section: Mapping[str, Any]) -> EngineConfig:
    """The `engine` section of a spec, `speculation` nested in it. Raises `InvalidSpec`."""
    values = dict(section)
    speculation = dict(values.pop("speculation", None) or {})
    _known_keys("engine", values, EngineConfig)
    _known_keys("engine.speculation", speculation, SpeculationConfig)
    try:
        return EngineConfig(**values, speculation=SpeculationConfig(**speculation))
    except (EngineError, TypeError) as error:
        raise InvalidSpec(f"engine: {error}") from error


def _input_spec(section: Mapping[str, Any]) -> InputSpec:
    values = dict(section)
    _known_keys("input", values, InputSpec)
    try:
        spec = InputSpec(**{**values, "paths": tuple(values["paths"])})
    except (KeyError, TypeError) as error:
        raise InvalidSpec(f"input: {error!r}; paths are needed") from error
    if (spec.prompt_column is None) == (spec.messages_column is None):
        raise InvalidSpec("input: exactly one of prompt_column and messages_column must be set")
    return spec


def _section(spec: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = spec.get(name)
    if not isinstance(section, Mapping):
        if section is None and name == "sampling":
            return {}
        raise InvalidSpec(f"the job spec has no section {name!r}")
    return section


def _known_keys(section: str, values: Mapping[str, Any], record: type[Any]) -> None:
    known = [field.name for field in fields(record)]
    for key in values:
        if key not in known:
            raise InvalidSpec(f"{section}: unknown key {key!r}{did_you_mean(key, known)}")
