"""Which tensors there are in the files of a checkpoint, before any of them is read.

Safetensors say so in their headers. What is read of pickled files (`pytorch_model.bin`) is names and shapes: pickle is
let build tensors and nothing else.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import is_zipfile

import torch

from workers.engine.errors import ModelNotFound, UnsupportedModel
from workers.engine.models.sources import LFS_POINTER, NOT_PULLED, is_pickled, weight_files

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
"""What transformers looks for, in this order."""
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "BOOL": torch.bool,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library."""


@dataclass(frozen=True, slots=True)
class TensorHeader:
    file: str
    dtype: str
    """As safetensors names it: F32, BF16, F8_E4M3, I32, ..."""
    shape: tuple[int, ...]


def read_headers(directory: Path, name: str) -> dict[str, TensorHeader]:
    """Every tensor that transformers would load from a directory, by its name in the file.

    Raises `ModelNotFound` where files are missing, `UnsupportedModel` where they are not what they should be.
    """
    tensors: dict[str, TensorHeader] = {}
    for file in _weight_files(directory, name):
        header = _read_header(file)
        if twice := sorted(header.keys() & tensors.keys()):
            raise UnsupportedModel(f"{file}: tensor {twice[0]} is in {tensors[twice[0]].file} as well")
        tensors |= header
    return tensors


def _weight_files(directory: Path, name: str) -> list[Path]:
    pickled = is_pickled(directory)
    single, shards_of = (PICKLED, PICKLED_INDEX) if pickled else (SINGLE, INDEX)
    if (directory / single).is_file():
        return [directory / single]
    index = directory / shards_of
    if not index.is_file():
        found = ", ".join(file.name for file in weight_files(directory))
        raise ModelNotFound(f"{name}: neither {single} nor {shards_of} in {directory}, only {found}")
    try:
        shards = json.loads(index.read_bytes())["weight_map"].values()
        files = sorted(set(shards))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnsupportedModel(f"{index}: no index of shards ({error})") from error
    _check_shards(index, files)
    return [directory / file for file in files]


def _check_shards(index: Path, files: Iterable[Any]) -> None:
    for file in files:
        kind = Path(index.name.removesuffix(".index.json")).suffix
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(kind):
            raise UnsupportedModel(f"{index}: names {file!r}, which is no {kind} file beside it")
        if not (index.parent / file).is_file():
            raise ModelNotFound(f"{index}: names {file}, which is not there")


def _read_header(file: Path) -> dict[str, TensorHeader]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(len(LFS_POINTER))
        if start == LFS_POINTER:
            raise UnsupportedModel(f"{file}: {NOT_PULLED}")
        if file.suffix == ".bin":
            return _read_pickled(file)
        length = struct.unpack("<Q", start[:8])[0] if len(start) >= 8 else size
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise UnsupportedModel(f"{file}: not a safetensors file, or cut off in its header ({size} bytes)")
        stream.seek(8)
        raw = stream.read(length)
    try:
        return _parse(file, json.loads(raw), size - 8 - length)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnsupportedModel(f"{file}: not a safetensors file ({error!r} in its header)") from error


def _read_pickled(file: Path) -> dict[str, TensorHeader]:
    try:
        # Mapped where the format allows it, so that no weights are read.
        tensors = torch.load(file, map_location="meta", weights_only=True, mmap=is_zipfile(file))
    except (UnpicklingError, RuntimeError, EOFError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UnsupportedModel(f"{file}: cannot be read as a file of tensors alone ({reason})") from error
    if not isinstance(tensors, dict) or not all(isinstance(value, torch.Tensor) for value in tensors.values()):
        raise UnsupportedModel(f"{file}: holds something else than named tensors")
    names = {dtype: name for name, dtype in DTYPES.items()}
    return {
        key: TensorHeader(file.name, names.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))
        for key, tensor in tensors.items()
    }


def _parse(file: Path, header: dict[str, Any], room: int) -> dict[str, TensorHeader]:
    """room: bytes that follow the header."""
    tensors = {key: value for key, value in header.items() if key != "__metadata__"}
    end = max((int(value["data_offsets"][1]) for value in tensors.values()), default=0)
    if end > room:
        raise UnsupportedModel(f"{file}: cut off, {end - room} bytes are missing at its end")
    return {
        key: TensorHeader(file.name, str(value["dtype"]), tuple(int(extent) for extent in value["shape"]))
        for key, value in tensors.items()
    }
