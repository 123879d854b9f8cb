"""What is known of a model as data: what can be planned with, and what a job's record says of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from workers.engine.state.kv_cache import CacheShape


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Sizes of a model and what its executor can do. Files alone give them, before any weights load."""

    cache_shape: CacheShape
    vocab_size: int
    """Columns of the logits."""
    max_model_len: int
    executor: str
    """Name of the class that runs it."""
    skips: bool = False
    """It can leave sublayers out: its executor is a `SkippingExecutor`."""
    lends_vocabulary: bool = False
    """To drafters that have no matrices of their own: its executor is a `Vocabulary`."""

    @property
    def keeps_hidden(self) -> bool:
        """Whether hidden states can be read from its cache."""
        return self.cache_shape.hidden_size > 0


@dataclass(frozen=True, slots=True)
class ModelReport:
    """How a loaded model runs, for the job's record."""

    architecture: str = "unknown"
    executor: str = "unknown"
    attention: str = "none"
    """Name of the backend."""
    dtype: str = "float32"
    """Of the weights: float32, bfloat16, int8, ..."""
    weight_bytes: int = 0
    device: str = "cpu"
    vocabulary: str | None = None
    """Hash of the tokenizer's vocabulary."""
    remote_code: dict[str, str] = field(default_factory=dict)
    """Hashes of the files of code that came with the model and ran."""
    batch_invariant: bool = True
    """No bit of a row depended on the rest of the batch when that was tried at load."""
    batch_variance: tuple[str, ...] = ()
    """Where it did: company, chunks, tree."""
