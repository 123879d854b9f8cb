"""A checkpoint of transformers becomes an executor and a tokenizer. Problems show before any weights load if they can.

dtype "auto" is the checkpoint's own, so that results do not depend on the machine. GGUF files are unpacked to float32,
and float16 becomes float32 on the CPU, which has no fast float16.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM

from workers.engine.api.config import EngineConfig
from workers.engine.api.phases import phase
from workers.engine.attention.interface import load_attention, resolve_attention
from workers.engine.models.executor import LoadedModel
from workers.engine.models.executors.choose import kind_of
from workers.engine.models.executors.fused import FusedExecutor
from workers.engine.models.executors.hf import HuggingFaceExecutor
from workers.engine.models.facts import ModelReport
from workers.engine.models.layers.precision import Precision, Weights
from workers.engine.models.loading.checks import confirm, probe
from workers.engine.models.loading.completeness import check_filled
from workers.engine.models.loading.gguf_copy import converted, described
from workers.engine.models.loading.invariance import self_test
from workers.engine.models.loading.outline import CPU_DTYPES, Outline
from workers.engine.models.loading.refusals import refusing
from workers.engine.models.loading.sources import Source, is_pickled, quiet, resolve
from workers.engine.models.loading.wanted import Wanted
from workers.engine.sampler.interface import sampler_on


def load_pretrained(wanted: Wanted) -> LoadedModel:
    """The model that is wanted, with as much context as `context_limit` says.

    Raises `ModelNotFound`, `UnsupportedModel` or `InvalidConfig`.
    """
    config = wanted.config
    source = converted(resolve(wanted.name, with_code=config.trust_remote_code))
    outline = Outline(source, wanted)
    tokenizer, vocabulary = outline.tokenizer, outline.vocabulary
    outline.check_tensors()
    source.fetch_weights()
    outline.check_tensors()  # those of the hub once more, as they arrived
    with phase("loading weights"):
        model = _load_weights(source, config, outline)
    with phase("checking the model"):
        attention = resolve_attention(config.attention, outline.device, model.dtype)
        executor = build_executor(model, attention, wanted.name, outline.max_model_len, wanted.weights)
        varying = self_test(executor)
        sampler_on(outline.device).prepare(model.dtype)
    return LoadedModel(
        executor=executor,
        tokenizer=tokenizer,
        name=wanted.name,
        content_hash=source.content_hash(),
        report=ModelReport(
            architecture=outline.config.model_type,
            executor=executor.facts.executor,
            attention=attention,
            dtype=str(executor.precision),
            weight_bytes=executor.weight_bytes,
            device=str(outline.device),
            vocabulary=vocabulary,
            remote_code=source.code_hashes(),
            batch_invariant=not varying,
            batch_variance=varying,
        ),
    )


def outline_pretrained(wanted: Wanted) -> Outline:
    """What the model's files say. Raises what `load_pretrained` raises before it loads weights."""
    source = described(resolve(wanted.name, with_code=wanted.config.trust_remote_code))
    if source.hub_id is None:
        source.fetch_weights()  # downloads nothing: the directory must hold some
    return Outline(source, wanted)


def build_executor(
    model: Any, attention: str, name: str, max_model_len: int, weights: Weights = Weights.WHOLE
) -> FusedExecutor | HuggingFaceExecutor:
    """The executor of a loaded transformers model, which it takes over. Raises `UnsupportedModel`."""
    precision = Precision(model.dtype, model.device, weights)
    with refusing(f"{name} ({model.config.model_type})"):
        precision.check_model(model, name)
        seen = probe(model, name, max_model_len)
        executor = kind_of(model)(model, load_attention(attention), seen.shape, max_model_len, precision)
        confirm(executor, seen, name)
        return executor


def _load_weights(source: Source, config: EngineConfig, outline: Outline) -> Any:
    dtype = "auto" if config.dtype == "auto" else getattr(torch, config.dtype)
    name = f"{source.name} ({outline.config.model_type})"
    with refusing(name), quiet():
        model, info = AutoModelForCausalLM.from_pretrained(
            source.path,
            config=outline.config,
            dtype=dtype,
            trust_remote_code=source.with_code,
            local_files_only=True,
            use_safetensors=not is_pickled(source.path),
            weights_only=True,
            output_loading_info=True,
        )
    check_filled(info, name)
    if outline.device.type == "cpu" and model.dtype not in CPU_DTYPES:
        model = model.float()
    return model.to(outline.device).eval()
