"""The seat of a model in the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch

from workers.engine.state.batch import Batch
from workers.engine.state.kv_cache import CacheShape, KVCache
from workers.engine.text.tokenizer import TextTokenizer


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
    def cache_shape(self) -> CacheShape: ...
    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        ...

    @property
    def max_model_len(self) -> int: ...
    @property
    def weight_bytes(self) -> int:
        """Memory that the weights take."""
        ...

    def forward(self, batch: Batch, cache: KVCache) -> ModelOutput: ...


@runtime_checkable
class Vocabulary(Protocol):
    """An executor that lends its two matrices over the vocabulary, to drafters that have none of their own."""

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """[T] -> [T, N], rows of the embedding table."""
        ...

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """[R, N] states after the final norm -> [R, V] logits."""
        ...


class Model(Protocol):
    """What is known of a model before its weights load and after: a `LoadedModel`, or an `Outline` of its files."""

    @property
    def executor(self) -> Executor:
        """An outline's has sizes and kinds alone: it cannot run."""
        ...

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
    details: dict[str, Any] = field(default_factory=dict)
    """What ran, for the job's record: dtype, attention backend, ..."""

    @property
    def vocabulary(self) -> str | None:
        return self.details.get("vocabulary")
