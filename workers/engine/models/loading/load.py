"""Load what an `EngineConfig` names. A scripted model needs no transformers, which takes seconds to import."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from workers.engine.api.config import EngineConfig
from workers.engine.api.errors import InvalidConfig
from workers.engine.models.executor import LoadedModel, Model
from workers.engine.models.executors import scripted
from workers.engine.models.facts import ModelFacts
from workers.engine.models.layers.precision import Weights
from workers.engine.models.loading.wanted import Wanted

log = logging.getLogger(__name__)
_Model = TypeVar("_Model", bound=Model)

SHARED = "target"
"""As a draft: the target's own weights."""


def load_model(config: EngineConfig) -> LoadedModel:
    """The target. Raises `ModelNotFound`, `UnsupportedModel` or `InvalidConfig`, naming the model or the option."""
    target = _load(Wanted(config.target, config, config.max_model_len))
    if varying := target.report.batch_variance:
        log.warning(
            "%s: the bits of a row depend on what else is in the batch here (%s): of two tokens within float noise of "
            "each other, another may come first in another run; see docs/losslessness.md",
            config.target,
            ", ".join(varying),
        )
    return target


def outline_model(config: EngineConfig) -> Model:
    """The target without its weights. Raises what `load_model` raises before it loads weights."""
    return _outline(Wanted(config.target, config, config.max_model_len))


def context_length(config: EngineConfig, target: ModelFacts) -> int:
    """Tokens that a sequence may have."""
    return min(target.max_model_len, config.max_model_len or target.max_model_len)


def load_draft(config: EngineConfig, target: LoadedModel) -> LoadedModel:
    """The draft model of `config.speculation`; "target" shares the target's weights, or is a copy in another precision.

    Its context may be shorter than the target's and is never longer; its vocabulary may be another. Raises what
    `load_model` raises.
    """
    return _draft(config, target, _load)


def outline_draft(config: EngineConfig, target: Model) -> Model:
    """What `load_draft` would load, without its weights."""
    return _draft(config, target, _outline)


def _draft(config: EngineConfig, target: _Model, open_model: Callable[[Wanted], _Model]) -> _Model:
    name, dtype = config.speculation.draft, config.speculation.draft_dtype
    if name is None:
        raise InvalidConfig(f"method {config.speculation.method} has no draft model")
    if name == SHARED:
        if dtype is None:
            return target
        name = config.target
    bound = context_length(config, target.facts)
    if dtype is None:
        return open_model(Wanted(name, config, bound=bound))
    if name.startswith(scripted.PREFIX):
        raise InvalidConfig(f"draft {name}: a scripted model has no weights, so draft_dtype {dtype} means nothing")
    if dtype in set(Weights):
        return open_model(Wanted(name, config, bound=bound, weights=Weights(dtype)))
    return open_model(Wanted(name, replace(config, dtype=dtype), bound=bound))


def _load(wanted: Wanted) -> LoadedModel:
    if wanted.name.startswith(scripted.PREFIX):
        return scripted.load_scripted(wanted.name)
    from workers.engine.models.loading.pretrained import load_pretrained

    return load_pretrained(wanted)


def _outline(wanted: Wanted) -> Model:
    if wanted.name.startswith(scripted.PREFIX):
        return scripted.load_scripted(wanted.name)
    from workers.engine.models.loading.pretrained import outline_pretrained

    return outline_pretrained(wanted)
