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

from workers.engine.api.errors import ModelNotFound, UnsupportedModel
from workers.engine.models.loading.refusals import reason
from workers.engine.models.loading.sources import Source, check_pulled, is_pickled, weight_files

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


def read_headers(source: Source) -> dict[str, TensorHeader] | None:
    """Every tensor that transformers would load of a model in its layout, by its name in the file.

    Headers of files that are still on the hub are read there; None: it has no safetensors, and pickled files are known
    once they are here. Raises `ModelNotFound` where files are missing, `UnsupportedModel` where they are not what they
    should be.
    """
    tensors: dict[str, TensorHeader] = {}
    for name in _weight_files(source):
        file = source.path / name
        header = _read_header(file) if file.is_file() or source.hub_id is None else _read_remote(source.hub_id, file)
        if header is None:
            return None
        if twice := sorted(header.keys() & tensors.keys()):
            raise UnsupportedModel(f"{file}: tensor {twice[0]} is in {tensors[twice[0]].file} as well")
        tensors |= header
    return tensors


def _weight_files(source: Source) -> list[str]:
    directory = source.path
    single, shards_of = (PICKLED, PICKLED_INDEX) if is_pickled(directory) else (SINGLE, INDEX)
    index = directory / shards_of
    if (directory / single).is_file() or (source.hub_id and not index.is_file()):
        return [single]
    if not index.is_file():
        found = ", ".join(file.name for file in weight_files(directory))
        if not found:
            raise ModelNotFound(f"{source.name}: no .safetensors file in {directory}, and no pytorch_model.bin")
        raise ModelNotFound(f"{source.name}: neither {single} nor {shards_of} in {directory}, only {found}")
    try:
        shards = json.loads(index.read_bytes())["weight_map"].values()
        files = sorted(set(shards))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnsupportedModel(f"{index}: no index of shards ({error})") from error
    _check_shards(index, files, on_hub=source.hub_id is not None)
    return files


def _read_remote(hub_id: str, file: Path) -> dict[str, TensorHeader] | None:
    """file: where it will be in the snapshot, a directory that is named after the commit. None: it is not there."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import EntryNotFoundError, SafetensorsParsingError

    try:
        found = HfApi().parse_safetensors_file_metadata(hub_id, file.name, revision=file.parent.name)
    except EntryNotFoundError:
        return None
    except SafetensorsParsingError as error:
        raise UnsupportedModel(f"{hub_id}: {file.name} is no safetensors file ({reason(error)})") from error
    except Exception as error:  # each HTTP library has its own
        raise ModelNotFound(f"{hub_id}: the hub did not give the header of {file.name}: {reason(error)}") from error
    return {key: TensorHeader(file.name, info.dtype, tuple(info.shape)) for key, info in found.tensors.items()}


def _check_shards(index: Path, files: Iterable[Any], *, on_hub: bool) -> None:
    for file in files:
        kind = Path(index.name.removesuffix(".index.json")).suffix
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(kind):
            raise UnsupportedModel(f"{index}: names {file!r}, which is no {kind} file beside it")
        if not on_hub and not (index.parent / file).is_file():
            raise ModelNotFound(f"{index}: names {file}, which is not there")


def _read_header(file: Path) -> dict[str, TensorHeader]:
    size = file.stat().st_size
    check_pulled(file)
    if file.suffix == ".bin":
        return _read_pickled(file)
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise UnsupportedModel(f"{file}: not a safetensors file, or cut off in its header ({size} bytes)")
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
        raise UnsupportedModel(f"{file}: cannot be read as a file of tensors alone ({reason(error)})") from error
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
