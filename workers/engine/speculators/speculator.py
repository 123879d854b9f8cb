"""The seat of a speculator in the engine, and the registry of those that fill it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol, runtime_checkable

from workers.engine.api.config import SCORERS, EngineConfig
from workers.engine.models.executor import LoadedModel, Model
from workers.engine.models.kv_memory import DraftMemory
from workers.engine.state.kv_cache import KVCache
from workers.engine.state.sequence import Sequence
from workers.engine.state.tree import DraftTree
from workers.engine.verifier import Verdict


class Speculator(Protocol):
    """Three verbs. Whatever is proposed, the output is the same: only speed depends on it."""

    @property
    def name(self) -> str: ...
    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Layers of the target whose hidden states it reads from the target's cache (`KVCache.hidden`)."""
        ...

    def max_nodes(self, length: int) -> int:
        """Most nodes of a tree that is `length` levels deep."""
        ...

    def propose(self, seqs: Seq[Sequence], lengths: Seq[int]) -> list[DraftTree]:
        """One tree per sequence, at most lengths[i] levels deep; the empty tree where there is nothing to propose."""
        ...

    def update(self, verdicts: Seq[Verdict]) -> None:
        """The sequences were extended: learn from it, keep what was accepted."""
        ...

    def release(self, seq: Sequence) -> None:
        """Drop everything kept for a sequence; it may come back after a preemption."""
        ...


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """Weights that a speculator keeps beside the target's, for the job's record."""

    name: str
    content_hash: str
    dtype: str
    """Of the weights: float32, bfloat16, int8, ..."""
    weight_bytes: int


@runtime_checkable
class Drafter(Protocol):
    """A speculator that may have loaded a draft."""

    @property
    def draft(self) -> LoadedDraft | None: ...


@runtime_checkable
class Caching(Protocol):
    """A speculator with a KV cache of its own, which the engine sizes with the target's."""

    @property
    def cache(self) -> KVCache: ...


@runtime_checkable
class Bounded(Protocol):
    """A speculator whose draft decides how deep its trees get, where the options do not."""

    @property
    def depth(self) -> int: ...


@runtime_checkable
class Detailed(Protocol):
    """A speculator that says what it drafts with where a file decided that, for the job's record."""

    @property
    def details(self) -> dict[str, Any]:
        """JSON values by name: an option as it was decided, or what no option names."""
        ...


@dataclass(frozen=True, slots=True)
class SpeculatorContext:
    """What a speculator may need to be made."""

    config: EngineConfig
    target: LoadedModel
    cache: KVCache
    """The target's. It has no blocks yet: caches are sized when all of them are known."""


REGISTRY = {
    "none": "workers.engine.speculators.none:NoSpeculator",
    "ngram": "workers.engine.speculators.lookup.ngram:NgramSpeculator",
    "suffix": "workers.engine.speculators.lookup.suffix:SuffixSpeculator",
    "draft_model": "workers.engine.speculators.draft_model.speculator:DraftModelSpeculator",
    "self": "workers.engine.speculators.self.speculator:SelfSpeculator",
    "medusa": "workers.engine.speculators.medusa.speculator:MedusaSpeculator",
    "eagle": "workers.engine.speculators.eagle.speculator:EagleSpeculator",
}
"""Classes with `create(context)`. Those of `SCORERS` have `check(config, target)` as well: it raises what `create`
would, as far as files tell, loads no weights, and returns the memory for keys and values that it would take."""


def make_speculators(context: SpeculatorContext) -> dict[str, Speculator]:
    """The engine's own method first, then those that single requests may ask for."""
    return {method: make_speculator(method, context) for method in context.config.speculation.methods}


def check_speculators(config: EngineConfig, target: Model) -> list[DraftMemory]:
    """Raise what `make_speculators` would raise, as far as files tell; what each method would keep for a token.

    Heads or a layer on the hub are downloaded.
    """
    return [_class(method).check(config, target) for method in config.speculation.methods if method in SCORERS]


def make_speculator(method: str, context: SpeculatorContext) -> Speculator:
    speculator: Speculator = _class(method).create(context)
    return speculator


def _class(method: str) -> Any:
    module, _, name = REGISTRY[method].partition(":")
    return getattr(import_module(module), name)
