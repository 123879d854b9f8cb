"""The interface of speculators, which draft tokens. Their registry is `workers.engine.api.methods`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from workers.engine.api.config import EngineConfig
from workers.engine.api.methods import REGISTRY
from workers.engine.models.executor import LoadedModel, Model
from workers.engine.models.kv_memory import DraftMemory
from workers.engine.state.kv_cache import KVCache
from workers.engine.state.sequence import Sequence
from workers.engine.state.tree import DraftTree
from workers.engine.verifier import Verdict


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """Weights that a speculator keeps beside the target's, for the job's record."""

    name: str
    content_hash: str
    dtype: str
    """Of the weights: float32, bfloat16, int8, ..."""
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """How a draft's tokens relate to the target's."""

    kind: str = "same"
    """same, mapped or text."""
    overlap: float = 1.0
    """Common tokens by tokens of the smaller vocabulary."""
    coverage: float = 1.0
    """Share of the target's tokens that the draft has."""


class Speculator(ABC):
    """Three verbs, and what it is known by. Whatever is proposed, the output is the same: only speed depends on it."""

    name: str
    hidden_layers: tuple[int, ...] = ()
    """Layers of the target whose hidden states it reads from the target's cache (`KVCache.hidden`)."""
    cache: KVCache | None = None
    """Its own, if it has one: the engine sizes it with the target's."""
    draft: LoadedDraft | None = None
    """What it loaded, if anything."""
    depth: int | None = None
    """How deep its trees get where its draft decides that and not the options."""
    vocabulary = DraftVocabulary()

    @classmethod
    def check(cls, config: EngineConfig, target: Model) -> DraftMemory:
        """Raise what `create` would, as far as files tell, and load no weights. Returns what it would keep."""
        return DraftMemory()

    @property
    def details(self) -> dict[str, Any]:
        """For the job's record, JSON values by name: an option as a file decided it, or what no option names."""
        return {}

    @abstractmethod
    def max_nodes(self, length: int) -> int:
        """Most nodes of a tree that is `length` levels deep."""

    @abstractmethod
    def propose(self, seqs: Seq[Sequence], lengths: Seq[int]) -> list[DraftTree]:
        """One tree per sequence, at most lengths[i] levels deep; the empty tree where there is nothing to propose."""

    def update(self, verdicts: Seq[Verdict]) -> None:  # noqa: B027 (most have nothing to do here)
        """The sequences were extended: learn from it, keep what was accepted."""

    def release(self, seq: Sequence) -> None:  # noqa: B027
        """Drop everything kept for a sequence; it may come back after a preemption."""


@dataclass(frozen=True, slots=True)
class SpeculatorContext:
    """What a speculator may need to be made."""

    config: EngineConfig
    target: LoadedModel
    cache: KVCache
    """The target's. It has no blocks yet: caches are sized when all of them are known."""


def make_speculators(context: SpeculatorContext) -> dict[str, Speculator]:
    """The engine's own method first, then those that single requests may ask for."""
    return {method: make_speculator(method, context) for method in context.config.speculation.methods}


def check_speculators(config: EngineConfig, target: Model) -> list[DraftMemory]:
    """Raise what `make_speculators` would raise, as far as files tell; what each method would keep for a token.

    Heads or a layer on the hub are downloaded.
    """
    return [_class(method).check(config, target) for method in config.speculation.methods]


def make_speculator(method: str, context: SpeculatorContext) -> Speculator:
    speculator: Speculator = _class(method).create(context)
    return speculator


def _class(method: str) -> Any:
    module, _, name = REGISTRY[method].partition(":")
    return getattr(import_module(module), name)
