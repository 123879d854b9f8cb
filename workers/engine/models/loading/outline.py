"""What the files of a checkpoint say before any weights load: sizes, kinds, context length, tokenizer."""

from __future__ import annotations

from functools import cached_property
from hashlib import blake2b
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from workers.engine.api.errors import InvalidConfig
from workers.engine.api.tokenizer import TextTokenizer
from workers.engine.attention.interface import resolve_attention
from workers.engine.models.executors.choose import kind_of
from workers.engine.models.facts import ModelFacts
from workers.engine.models.layers.precision import Precision
from workers.engine.models.loading.checks import check_config, check_length, context_limit, foresee
from workers.engine.models.loading.completeness import check_tensors
from workers.engine.models.loading.gguf_copy import converted
from workers.engine.models.loading.reading import (
    check_quantisation,
    eos_token_ids,
    model_class,
    read_config,
    read_tokenizer,
)
from workers.engine.models.loading.refusals import refusing
from workers.engine.models.loading.sources import Source, quiet
from workers.engine.models.loading.wanted import Wanted
from workers.engine.models.shapes import cache_shape
from workers.engine.sampler.interface import require_sampler
from workers.engine.text.tokenizer import HuggingFaceTokenizer

CPU_DTYPES = (torch.float32, torch.bfloat16, torch.float64)


class Outline:
    """`Model` of a checkpoint whose weights are not loaded; each fact is read when it is asked for.

    Raises `UnsupportedModel` or `InvalidConfig` for what the config alone shows to be impossible.
    """

    def __init__(self, source: Source, wanted: Wanted) -> None:
        self.name = source.name
        self.device = resolve_device(wanted.config.device)
        self.config = read_config(source)
        """transformers' config of the model."""
        self._label = f"{self.name} ({self.config.model_type})"
        with refusing(self._label):
            self._model_class = model_class(self.config, source)
            check_config(self.config, self._model_class, self.name)
            self.max_model_len = context_limit(self.config, self.name, wanted.max_model_len, wanted.bound)
            if self.max_model_len < 1:
                raise InvalidConfig(f"{self._label}: config.json gives a context of {self.max_model_len} tokens")
            check_length(self.config, self.name, self.max_model_len)
            check_quantisation(self.config, source)
        self._source = source
        self._wanted = wanted

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        return HuggingFaceTokenizer(self._tokenizer, eos_token_ids(self._source, self._tokenizer, self.config))

    @cached_property
    def vocabulary(self) -> str:
        vocabulary = sorted(self._tokenizer.get_vocab().items(), key=lambda item: item[1])
        return blake2b(repr(vocabulary).encode(errors="surrogatepass"), digest_size=16).hexdigest()

    @cached_property
    def content_hash(self) -> str:
        """Of the weights as they are loaded: downloads those of a hub model, and converts a GGUF file."""
        source = converted(self._source)
        source.fetch_weights()
        return source.content_hash()

    @cached_property
    def facts(self) -> ModelFacts:
        """Raises `UnsupportedModel` where its files, the attention backend or the precision rule this model out."""
        with refusing(f"{self._label} cannot be built from its config.json"):
            skeleton = self._skeleton()
        if not self._source.is_gguf:  # one that is not converted yet is checked when it is
            self.check_tensors()
        with refusing(self._label):
            require_sampler(self.device)
            resolve_attention(self._wanted.config.attention, self.device, skeleton.dtype)
            self.precision.check_model(skeleton, self.name)
            shape = cache_shape(skeleton.config, self.max_model_len, skeleton.dtype, self.device)
            facts = kind_of(skeleton, self.device).facts_of(skeleton, shape, self.max_model_len)
            foresee(skeleton, self.name, self.max_model_len)
        return facts

    def check_tensors(self) -> None:
        """Raise `UnsupportedModel` unless the weight files hold what the model needs; reads their headers alone."""
        check_tensors(self._source, self.config, self._model_class)

    @cached_property
    def _tokenizer(self) -> Any:
        return read_tokenizer(self._source)

    @cached_property
    def precision(self) -> Precision:
        """In which the model will run."""
        wanted = self._wanted.config.dtype
        dtype = self.config.dtype if wanted == "auto" else wanted
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype or torch.float32
        if self._source.is_gguf or (self.device.type == "cpu" and dtype not in CPU_DTYPES):
            dtype = torch.float32
        return Precision(dtype, self.device, self._wanted.weights)

    def _skeleton(self) -> Any:
        """The transformers model without weights."""
        with quiet(), torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                self.config, dtype=self.precision.dtype, trust_remote_code=self._source.with_code
            )


def resolve_device(name: str) -> torch.device:
    """The torch device that an option names; "auto" is CUDA where there is one. Raises `InvalidConfig`."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidConfig(f"device {name!r}: {str(error).partition(chr(10))[0]}") from error
    if device.type not in ("cpu", "cuda"):
        raise InvalidConfig(f"device must be auto, cpu or cuda, got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InvalidConfig(f"device {name!r}: torch {torch.__version__} sees no CUDA device")
    return device
