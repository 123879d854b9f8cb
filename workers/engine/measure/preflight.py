"""Before an engine starts: whether it could, and which requests it would refuse. Reads files, loads no weights.

What measures and this module are the door of the engine for those who plan with it and do not run it.
"""

from __future__ import annotations

from dataclasses import dataclass

from workers.engine.api.config import EngineConfig
from workers.engine.api.request import Request
from workers.engine.api.tokenizer import TextTokenizer
from workers.engine.batcher import check_request
from workers.engine.models.kv_memory import plan_kv
from workers.engine.models.loading.load import context_length, outline_model
from workers.engine.speculators.self.speculator import with_skip_set
from workers.engine.speculators.speculator import check_speculators


@dataclass(frozen=True, slots=True)
class Preview:
    """A target before its weights load."""

    tokenizer: TextTokenizer
    max_model_len: int
    """Tokens that a sequence may have."""


def preview(config: EngineConfig) -> Preview:
    """What files say of the target. Raises what `load_model` would, as far as files tell."""
    target = outline_model(config)
    return Preview(target.tokenizer, context_length(config, target.facts))


def with_calibrated_skip_set(config: EngineConfig) -> EngineConfig:
    """With the skip set in it that a file decides, for method self, and nothing else looked at.

    Raises what looking at the target raises, and `NoSkipSet` or `InvalidConfig` for the file.
    """
    return with_skip_set(config, outline_model(config))


class Preflight:
    """What an engine of this configuration would be.

    Raises what starting one would raise, as far as files tell: `ModelNotFound`, `UnsupportedModel`, `InvalidConfig`.
    A hub model's config and tokenizer are downloaded, the headers of its weight files are read there, and heads or a
    draft layer are downloaded; for method `self` with a calibrated skip set, which belongs to certain weights, the
    target's weights as well.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._target = outline_model(config)
        self.tokenizer = self._target.tokenizer
        self.max_model_len = context_length(config, self._target.facts)
        self._kv = plan_kv(config, self._target.facts, check_speculators(config, self._target))
        self.config = with_skip_set(config, self._target)
        """With what files of this machine decide written into it, so that it means the same on any other."""

    def check(self, request: Request) -> None:
        """Raise the `EngineError` with which the engine would refuse the request."""
        check_request(request, self.config, self._target.facts, self._kv.capacity)
