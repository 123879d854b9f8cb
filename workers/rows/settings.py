"""From the JSON sections of a job spec to the engine's own values, and back: the one place for runner and workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Any

from storage.spec import JobSpec
from storage.suggest import did_you_mean
from workers.engine.api.config import EngineConfig, SpeculationConfig
from workers.engine.api.errors import EngineError
from workers.engine.api.sampling_params import SamplingParams
from workers.errors import InvalidSpec


def engine_config(spec: JobSpec) -> EngineConfig:
    """The `engine` section, `speculation` nested in it. Raises `InvalidSpec`, naming the section and the key."""
    values = dict(spec.engine)
    speculation = dict(values.pop("speculation", None) or {})
    _known_keys("engine", values, EngineConfig)
    _known_keys("engine.speculation", speculation, SpeculationConfig)
    try:
        return EngineConfig(**values, speculation=SpeculationConfig(**speculation))
    except (EngineError, TypeError) as error:
        raise InvalidSpec(f"engine: {error}") from error


def with_engine(spec: JobSpec, config: EngineConfig) -> JobSpec:
    """The spec with this engine, every field written out."""
    return replace(spec, engine=asdict(config))


def sampling_params(spec: JobSpec) -> SamplingParams:
    """The `sampling` section as it is for a row that changes nothing, without `bad_words`: only a tokenizer can tell
    what they are (`workers.rows.sampling`). Raises `InvalidParams`."""
    return SamplingParams(**{key: value for key, value in spec.sampling.items() if key != "bad_words"})


def _known_keys(section: str, values: Mapping[str, Any], record: type[Any]) -> None:
    known = [field.name for field in fields(record)]
    for key in values:
        if key not in known:
            raise InvalidSpec(f"{section}: unknown key {key!r}{did_you_mean(key, known)}")
