"""A checkpoint holds every tensor of its model, in its shape, and none that the model has no place for.

transformers fills what is missing with random numbers, and drops what it does not know: two loads of one file would
answer differently, or scales of quantised weights would be lost. Both are refused, by name. What the families leave out
or carry along without use is known to transformers (tied heads, rotary tables, layers for training alone) and allowed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from workers.engine.api.errors import UnsupportedModel
from workers.engine.models.loading.headers import DTYPES, TensorHeader, read_headers
from workers.engine.models.loading.refusals import refusing
from workers.engine.models.loading.sources import Source, quiet

SHOWN = 4
UNUSED = re.compile(r"\.attn\.masked_bias$|(^|\.)position_ids$")
"""Constants in old files that no computation reads, beside those that the model's class lists itself."""
LAYOUTS = {
    r"\.(qweight|qzeros|g_idx)$": "GPTQ or AWQ",
    r"\.weight_packed$": "compressed-tensors",
    r"\.(weight_scale_inv|weight_scale(_2)?|input_scale|k_scale|v_scale)$": "FP8 or ModelOpt",
    r"\.(absmax|quant_map|nested_absmax|SCB)$|\.quant_state\.": "bitsandbytes",
    r"_(blocks|scales)$": "MXFP4",
    r"\.(scales|zeros|W_q|meta)$": "quantised",
}
"""Tensors beside the weights -> the kind of quantisation that they belong to."""
PLAIN = {"F64", "F32", "F16", "BF16"}


def check_tensors(source: Source, config: Any, model_class: Any) -> None:
    """Compare the headers of the weight files with the model that the config describes, without reading any weights.

    Files that tell nothing before they are downloaded pass until then.

    Raises `ModelNotFound` or `UnsupportedModel`.
    """
    tensors = read_headers(source)
    if tensors is None:
        return
    name = f"{source.name} ({config.model_type})"
    if getattr(config, "quantization_config", None) is None:
        _check_dtypes(tensors, name)
    with refusing(f"{name}: its tensors do not make up the model"), quiet():
        # transformers' own way from a file's names to the model's: renamed, and joined where layers are fused.
        _, info = model_class.from_pretrained(
            None,
            config=config,
            state_dict={key: _empty(tensor, key, name) for key, tensor in tensors.items()},
            device_map={"": "meta"},
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    check_filled(info, name, tensors)


def check_filled(info: Mapping[str, Any], name: str, in_files: Iterable[str] = ()) -> None:
    """Raise `UnsupportedModel` for what transformers' report of a load lists as missing, mismatched or left over.

    in_files: names of the tensors in the files, to tell a layout by.
    """
    unexpected = sorted(key for key in info["unexpected_keys"] if not UNUSED.search(key))
    kind = _layout([*in_files, *unexpected])
    hint = f" (they look like {kind} weights, of which config.json says nothing in quantization_config)" if kind else ""
    if mismatched := sorted(info["mismatched_keys"]):
        key, found, needed = mismatched[0]
        more = f", and {len(mismatched) - 1} more do not fit" if len(mismatched) > 1 else ""
        raise UnsupportedModel(f"{name}: tensor {key} is {list(found)}, the model needs {list(needed)}{more}{hint}")
    if missing := sorted(info["missing_keys"]):
        raise UnsupportedModel(f"{name}: {_count(missing)} of the model missing in its files: {_some(missing)}{hint}")
    if unexpected:
        if any(key.startswith("rope_f") for key in unexpected):
            hint = (
                "; they scale its rotary angles, which transformers does not read from GGUF: take the safetensors files"
            )
        raise UnsupportedModel(
            f"{name}: {_count(unexpected)} in its files that the model has no place for: {_some(unexpected)}{hint}"
        )
    if info.get("error_msgs"):
        raise UnsupportedModel(f"{name}: {'; '.join(info['error_msgs'])}")


def _check_dtypes(tensors: Mapping[str, TensorHeader], name: str) -> None:
    for key, tensor in tensors.items():
        if tensor.dtype not in PLAIN and (key.endswith(".weight") or tensor.dtype.startswith("F")):
            kind = _layout(tensors) or "quantised"
            raise UnsupportedModel(
                f"{name}: {tensor.file} holds {kind} weights (tensor {key} is {tensor.dtype}), of which config.json "
                "says nothing in quantization_config"
            )


def _empty(tensor: TensorHeader, key: str, name: str) -> torch.Tensor:
    if tensor.dtype not in DTYPES:
        raise UnsupportedModel(f"{name}: {tensor.file} holds tensor {key} of the unknown type {tensor.dtype}")
    return torch.empty(tensor.shape, dtype=DTYPES[tensor.dtype], device="meta")


def _layout(keys: Iterable[str]) -> str | None:
    found = list(keys)
    return next((kind for pattern, kind in LAYOUTS.items() if any(re.search(pattern, key) for key in found)), None)


def _count(keys: list[str]) -> str:
    return "1 tensor" if len(keys) == 1 else f"{len(keys)} tensors"


def _some(keys: list[str]) -> str:
    return ", ".join(keys[:SHOWN]) + (", ..." if len(keys) > SHOWN else "")
