"""Config, tokenizer and model class of a checkpoint, as transformers reads them from its small files.

Nothing of a checkpoint is executed unless the source says so (`Source.with_code`): no module that its `auto_map` names,
no attention or expert kernel that its config asks for by name, no question at a terminal. A config that transformers
has a class of its own for is read by that class.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    dynamic_module_utils,
)
from transformers.quantizers.auto import AutoHfQuantizer, get_hf_quantizer

from workers.engine.api.errors import UnsupportedModel
from workers.engine.models.loading.refusals import refusing
from workers.engine.models.loading.sources import Source, quiet

MODALITIES = {"vision_config", "audio_config", "image_config", "video_config", "speech_config", "vq_config"}
"""Parts of a config that say what else than text a model reads."""

# Where no answer is given in code, transformers asks at the terminal whether to run what came with the model.
dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0


def read_config(source: Source) -> Any:
    """transformers' config of a model. Raises `UnsupportedModel`."""
    if source.with_code:
        _check_references(source)
    config = _read(AutoConfig, source, "config.json")
    # By these names a config could have kernels fetched from the hub; our own choice is made at load.
    config._attn_implementation = None
    config._experts_implementation = None
    if not isinstance(config.dtype, torch.dtype | None):
        raise UnsupportedModel(f"{source.name}: config.json: dtype is {config.dtype!r}, which names no precision")
    if getattr(config, "transformers_weights", None) is not None:
        raise UnsupportedModel(
            f"{source.name}: config.json: transformers_weights names weight files, which must be model.safetensors or "
            "what model.safetensors.index.json lists"
        )
    return config


def read_tokenizer(source: Source) -> Any:
    """transformers' tokenizer of a model. Raises `UnsupportedModel`."""
    tokenizer = _read(AutoTokenizer, source, "its tokenizer")
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise UnsupportedModel(f"{source.name}: tokenizer_config.json names {type(tokenizer).__name__}, no tokenizer")
    if not tokenizer.get_vocab().keys() - tokenizer.get_added_vocab().keys():
        # transformers makes an empty tokenizer where there are no files for one.
        raise UnsupportedModel(
            f"{source.name}: its tokenizer has no tokens: the files of the tokenizer (tokenizer.json, tokenizer.model, "
            "vocab.json, ...) are missing"
        )
    return tokenizer


def eos_token_ids(source: Source, tokenizer: Any, model_config: Any) -> frozenset[int]:
    """Ids that end a text, by any of generation config, model config and tokenizer."""
    found: list[Any] = [tokenizer.eos_token_id, model_config.eos_token_id]
    if (source.path / "generation_config.json").is_file():
        found.append(_read(GenerationConfig, source, "generation_config.json").eos_token_id)
    ids: set[int] = set()
    for value in found:
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(ids)


def model_class(model_config: Any, source: Source) -> Any:
    """The class that `AutoModelForCausalLM` makes of this config. Raises `UnsupportedModel` where there is none."""
    name = f"{source.name} ({model_config.model_type})"
    kinds = [key.removesuffix("_config") for key in type(model_config).sub_configs if key in MODALITIES]
    parts = f" (it has a part for {', '.join(kinds)})" if kinds else ""
    own = _own_code(model_config).get("AutoModelForCausalLM")
    if own and source.with_code:
        with _refused(source, own):
            return dynamic_module_utils.get_class_from_dynamic_module(own, source.path, local_files_only=True)
    if type(model_config) in AutoModelForCausalLM._model_mapping:
        if kinds:
            raise UnsupportedModel(f"{name} is a multimodal model{parts}; only text models run")
        return AutoModelForCausalLM._model_mapping[type(model_config)]
    if own:
        raise UnsupportedModel(_needs_code(source, own))
    raise UnsupportedModel(f"{name} is not a causal language model{parts}")


def check_quantisation(model_config: Any, source: Source) -> None:
    """Raise `UnsupportedModel` where the weights are quantised in a way that nothing installed here can read."""
    quantised = getattr(model_config, "quantization_config", None)
    if quantised is None:
        return
    method = quantised.get("quant_method") if isinstance(quantised, dict) else None
    name = f"{source.name} ({model_config.model_type}) is quantised by {method or 'an unnamed method'}"
    with refusing(name), quiet():
        if not AutoHfQuantizer.supports_quant_method(quantised):
            raise UnsupportedModel(f"{name}, which transformers does not know")
        get_hf_quantizer(deepcopy(model_config), None, None, True, {})


def _read(loader: Any, source: Source, part: str) -> Any:
    options: dict[str, Any] = {"local_files_only": True}
    if loader is not GenerationConfig:
        options["trust_remote_code"] = source.with_code
    if source.is_gguf:
        options["gguf_file"] = source.path.name
    with _refused(source, part), quiet(), source.directory() as directory:
        return loader.from_pretrained(directory, **options)


@contextmanager
def _refused(source: Source, part: str) -> Iterator[None]:
    with refusing(f"{source.name}: {part}"):
        try:
            yield
        except Exception as error:
            if "trust_remote_code" in str(error):
                raise UnsupportedModel(_needs_code(source, "see auto_map in its config files")) from error
            source.check_pulled()
            raise


def _check_references(source: Source) -> None:
    """Raise `UnsupportedModel` where a config file names code of another repository: only its own was agreed to."""
    for file in source.path.glob("*.json"):
        with suppress(ValueError):
            found = json.loads(file.read_bytes())
            named = found.get("auto_map") if isinstance(found, dict) else None
            for reference in re.findall(r"[\w./-]+--[\w.]+", json.dumps(named)):
                raise UnsupportedModel(
                    f"{source.name}: {file.name} names code of another repository ({reference}), which is not fetched: "
                    "copy its Python files beside the model, and name them there"
                )


def _own_code(model_config: Any) -> dict[str, str]:
    named = getattr(model_config, "auto_map", None)
    return named if isinstance(named, dict) else {}


def _needs_code(source: Source, where: str) -> str:
    return (
        f"{source.name} can only run with Python code that comes with it ({where}): read it, and if you trust it set "
        "engine.trust_remote_code to true"
    )
