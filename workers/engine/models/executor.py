"""The interface of what runs a model, and models before and after their weights load."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, cast

import torch

from workers.engine.api.tokenizer import TextTokenizer
from workers.engine.models.facts import ModelFacts, ModelReport
from workers.engine.models.skipping import SkipSet
from workers.engine.state.batch import Batch
from workers.engine.state.kv_cache import KVCache


@dataclass(frozen=True, slots=True)
class ModelOutput:
    logits: torch.Tensor
    """[R, V] for `Batch.logits_rows`, in the model's dtype; R counts the padding rows too."""


class Executor(Protocol):
    """Runs a model over packed rows.

    The contract: the logits of a row depend on that row's tokens and the keys that `Batch.rows` lists, and on nothing
    else in the batch; keys and values of every row are written to `Batch.slots` before they are read. The hidden states
    of every row are written there too, for the layers that `KVCache.hidden` lists.
    """

    @property
    def facts(self) -> ModelFacts: ...
    @property
    def weight_bytes(self) -> int:
        """Memory that the weights take."""
        ...

    def forward(self, batch: Batch, cache: KVCache) -> ModelOutput: ...


class Vocabulary(Protocol):
    """An executor that lends its two matrices over the vocabulary (`ModelFacts.lends_vocabulary`)."""

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, N], rows of the embedding table."""
        ...

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, N] states after the final norm -> [R, V] logits."""
        ...


class SkippingExecutor(Protocol):
    """An executor that can leave sublayers out (`ModelFacts.skips`)."""

    def forward_skipping(self, batch: Batch, cache: KVCache, skip: SkipSet) -> ModelOutput:
        """`forward` without the sublayers of `skip`. Attention layers that are left out write no keys and values; what
        the others write to `Batch.slots` is not the model's own: write it again before anybody relies on it.
        """
        ...


class Model(Protocol):
    """What is known of a model before its weights load and after: a `LoadedModel`, or an `Outline` of its files."""

    @property
    def facts(self) -> ModelFacts: ...
    @property
    def tokenizer(self) -> TextTokenizer: ...
    @property
    def name(self) -> str: ...
    @property
    def content_hash(self) -> str: ...
    @property
    def vocabulary(self) -> str | None:
        """Hash of the tokenizer's vocabulary."""
        ...


@dataclass(frozen=True, slots=True)
class LoadedModel:
    executor: Executor
    tokenizer: TextTokenizer
    name: str
    content_hash: str
    """Hash of the weights' file names, sizes and headers; says whether two runs used the same model."""
    report: ModelReport = field(default_factory=ModelReport)

    @property
    def facts(self) -> ModelFacts:
        return self.executor.facts

    @property
    def vocabulary(self) -> str | None:
        return self.report.vocabulary

    @property
    def lender(self) -> Vocabulary | None:
        """Its executor, if that lends its matrices."""
        return cast(Vocabulary, self.executor) if self.facts.lends_vocabulary else None

    @property
    def skipper(self) -> SkippingExecutor | None:
        """Its executor, if that can leave sublayers out."""
        return cast(SkippingExecutor, self.executor) if self.facts.skips else None
