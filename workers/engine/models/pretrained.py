"""A checkpoint of transformers becomes an executor and a tokenizer. Problems show before any weights load if they can.

dtype "auto" is the checkpoint's own, so that results do not depend on the machine. GGUF files are unpacked to float32,
and float16 becomes float32 on the CPU, which has no fast float16.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from workers.engine.attention.backend import load_attention, resolve_attention
from workers.engine.config import EngineConfig
from workers.engine.errors import InvalidConfig, UnsupportedModel
from workers.engine.models.checks import INT8_TOLERANCE, check_config, confirm, context_limit, probe
from workers.engine.models.executor import LoadedModel
from workers.engine.models.fused import FusedExecutor, covers
from workers.engine.models.gguf_copy import converted
from workers.engine.models.hf import HuggingFaceExecutor
from workers.engine.models.invariance import self_test
from workers.engine.models.quantised import check_quantisable
from workers.engine.models.sources import Source, quiet, resolve
from workers.engine.tokenizer import HuggingFaceTokenizer, TextTokenizer

CPU_DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def load_pretrained(target: str, config: EngineConfig, max_model_len: int | None, *, int8: bool = False) -> LoadedModel:
    """The model that `target` names. Raises `ModelNotFound`, `UnsupportedModel` or `InvalidConfig`."""
    device = resolve_device(config.device)
    source = _local(target)
    model_config = _read(AutoConfig, source, config.trust_remote_code)
    limit = context_limit(model_config, target, max_model_len)
    check_config(model_config, _model_class(model_config, source), target, limit)
    tokenizer, vocabulary = _load_tokenizer(source, model_config, config.trust_remote_code)
    source.fetch_weights()
    model = _load_weights(source, config, device)
    attention = resolve_attention(config.attention, device, model.dtype)
    executor = build_executor(model, attention, target, limit, int8=int8)
    return LoadedModel(
        executor=executor,
        tokenizer=tokenizer,
        name=target,
        content_hash=source.content_hash(),
        details={
            "architecture": model_config.model_type,
            "executor": type(executor).__name__,
            "attention": attention,
            "dtype": "int8" if int8 else str(executor.cache_shape.dtype).removeprefix("torch."),
            "weight_bytes": executor.weight_bytes,
            "device": str(device),
            "vocabulary": vocabulary,
            **self_test(executor),
        },
    )


def load_pretrained_tokenizer(target: str, trust_remote_code: bool) -> TextTokenizer:
    """The tokenizer alone, without weights. Raises `ModelNotFound`."""
    source = _local(target)
    return _load_tokenizer(source, _read(AutoConfig, source, trust_remote_code), trust_remote_code)[0]


def build_executor(
    model: Any, attention: str, name: str, max_model_len: int, *, int8: bool = False
) -> FusedExecutor | HuggingFaceExecutor:
    """The executor of a loaded transformers model, which it takes over. Raises `UnsupportedModel`.

    int8: with 8-bit linear layers, for drafts.
    """
    if int8:
        check_quantisable(model, name)
    seen = probe(model, name, max_model_len)
    kind = FusedExecutor if covers(model) else HuggingFaceExecutor
    executor = kind(model, load_attention(attention), seen.shape, max_model_len, int8=int8)
    confirm(executor, seen, name, tolerance=INT8_TOLERANCE if int8 else None)
    return executor


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


def _local(target: str) -> Source:
    source = resolve(target)
    return converted(source) if source.is_gguf else source


def _read(loader: Any, source: Source, trust_remote_code: bool) -> Any:
    """Config, tokenizer or model class `loader`, from a directory."""
    try:
        with quiet():
            return loader.from_pretrained(source.path, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"{source.name}: {error}") from error


def _model_class(model_config: Any, source: Source) -> Any:
    if "AutoModelForCausalLM" in getattr(model_config, "auto_map", {}):
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        return get_class_from_dynamic_module(model_config.auto_map["AutoModelForCausalLM"], source.path)
    if type(model_config) not in AutoModelForCausalLM._model_mapping:
        raise UnsupportedModel(f"{source.name} ({model_config.model_type}) is not a causal language model")
    return AutoModelForCausalLM._model_mapping[type(model_config)]


def _load_tokenizer(source: Source, model_config: Any, trust_remote_code: bool) -> tuple[TextTokenizer, str]:
    """The tokenizer and a hash of its vocabulary."""
    tokenizer = _read(AutoTokenizer, source, trust_remote_code)
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    digest = blake2b(repr(vocabulary).encode(errors="surrogatepass"), digest_size=16).hexdigest()
    return HuggingFaceTokenizer(tokenizer, _eos_token_ids(source, tokenizer, model_config)), digest


def _eos_token_ids(source: Source, tokenizer: Any, model_config: Any) -> frozenset[int]:
    """Ids that end a text, by any of generation config, model config and tokenizer."""
    found: list[Any] = [tokenizer.eos_token_id, model_config.eos_token_id]
    if (source.path / "generation_config.json").is_file():
        found.append(_read(GenerationConfig, source, False).eos_token_id)
    ids: set[int] = set()
    for value in found:
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(ids)


def _load_weights(source: Source, config: EngineConfig, device: torch.device) -> Any:
    dtype = "auto" if config.dtype == "auto" else getattr(torch, config.dtype)
    try:
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(
                source.path, dtype=dtype, trust_remote_code=config.trust_remote_code, local_files_only=True
            )
    except (OSError, ValueError) as error:
        raise UnsupportedModel(f"{source.name}: {error}") from error
    if device.type == "cpu" and model.dtype not in CPU_DTYPES:
        model = model.float()
    return model.to(device).eval()
