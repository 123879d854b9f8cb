"""The headers of a checkpoint's safetensors files: which tensors there are, before any of them is read."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.engine.errors import ModelNotFound, UnsupportedModel
from workers.engine.models.sources import LFS_POINTER, NOT_PULLED

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
"""What transformers looks for, in this order."""
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
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    index = directory / INDEX
    if not index.is_file():
        found = ", ".join(sorted(file.name for file in directory.glob("*.safetensors")))
        raise ModelNotFound(f"{name}: neither {SINGLE} nor {INDEX} in {directory}, only {found}")
    try:
        shards = json.loads(index.read_bytes())["weight_map"].values()
        files = sorted(set(shards))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnsupportedModel(f"{index}: no index of shards ({error})") from error
    _check_shards(index, files)
    return [directory / file for file in files]


def _check_shards(index: Path, files: Iterable[Any]) -> None:
    for file in files:
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise UnsupportedModel(f"{index}: names {file!r}, which is no safetensors file beside it")
        if not (index.parent / file).is_file():
            raise ModelNotFound(f"{index}: names {file}, which is not there")


def _read_header(file: Path) -> dict[str, TensorHeader]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(len(LFS_POINTER))
        if start == LFS_POINTER:
            raise UnsupportedModel(f"{file}: {NOT_PULLED}")
        length = struct.unpack("<Q", start[:8])[0] if len(start) >= 8 else size
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise UnsupportedModel(f"{file}: not a safetensors file, or cut off in its header ({size} bytes)")
        stream.seek(8)
        raw = stream.read(length)
    try:
        return _parse(file, json.loads(raw), size - 8 - length)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnsupportedModel(f"{file}: not a safetensors file ({error!r} in its header)") from error


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
