"""The files of a draft that is no model of its own: heads, or a layer. Every tensor is asked for by name and shape."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from workers.engine.api.errors import ModelNotFound, UnsupportedModel
from workers.engine.models.loading.refusals import refusing
from workers.engine.models.loading.sources import check_pulled, hash_weights, resolve


@dataclass(frozen=True, slots=True)
class DraftFiles:
    """A directory with a config.json and weights."""

    name: str
    path: Path
    config: dict[str, Any]

    def tensors(self, stems: Iterable[str]) -> Tensors:
        """Read the first of these files that exists. Pickled ones may hold tensors and nothing else.

        Raises `ModelNotFound` when there is none, `UnsupportedModel` when it cannot be read.
        """
        tried = list(stems)
        for file in (self.path / stem for stem in tried):
            if file.is_file():
                return Tensors(f"{self.name}/{file.name}", _read(file), hash_weights([file]))
        raise ModelNotFound(f"{self.name}: none of {', '.join(tried)} in {self.path}")


def open_draft(name: str) -> DraftFiles:
    """Find a draft's directory, or download it from the hub. Raises `ModelNotFound` or `UnsupportedModel`."""
    source = resolve(name)
    if source.path.is_file():
        raise ModelNotFound(f"{name}: a directory with config.json and weights is needed, not a model file")
    source.fetch(["*.safetensors", "*.pt", "*.bin"])
    file = source.path / "config.json"
    check_pulled(file)
    with refusing(f"{name}/config.json"):
        config = json.loads(file.read_text())
    if not isinstance(config, dict):
        raise UnsupportedModel(f"{name}/config.json: holds {type(config).__name__}, not keys and values")
    return DraftFiles(name, source.path, config)


def _read(file: Path) -> dict[str, torch.Tensor]:
    check_pulled(file)
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        # Mapped where the format allows it, as safetensors always are: whoever checks shapes reads no weights.
        tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zipfile(file))
    except (SafetensorError, UnpicklingError, RuntimeError, EOFError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise UnsupportedModel(f"{file}: cannot be read as a file of tensors alone ({reason})") from error
    if not isinstance(tensors, dict) or not all(isinstance(value, torch.Tensor) for value in tensors.values()):
        raise UnsupportedModel(f"{file}: holds something else than named tensors")
    return tensors


@dataclass(slots=True)
class Tensors:
    """A checkpoint from which tensors are taken one by one; what nobody took is refused at the end."""

    name: str
    _all: dict[str, torch.Tensor]
    content_hash: str
    _taken: set[str] = field(default_factory=set)

    def __contains__(self, key: str) -> bool:
        return key in self._all

    @property
    def keys(self) -> list[str]:
        return sorted(self._all)

    def rename(self, before: str, after: str) -> None:
        """Give every key that starts with `before` the prefix `after`."""
        self._all = {after + key[len(before) :] if key.startswith(before) else key: t for key, t in self._all.items()}

    def take(self, key: str, *shape: int) -> torch.Tensor:
        """The tensor of that name; raises `UnsupportedModel` when it is missing or has another shape."""
        tensor = self._all.get(key)
        if tensor is None:
            raise UnsupportedModel(f"{self.name}: tensor {key} {list(shape)} is missing")
        if tuple(tensor.shape) != shape:
            raise UnsupportedModel(f"{self.name}: tensor {key} is {list(tensor.shape)}, {list(shape)} is needed")
        self._taken.add(key)
        return tensor

    def find(self, key: str, *shape: int) -> torch.Tensor | None:
        return self.take(key, *shape) if key in self._all else None

    def finish(self, ignored: Iterable[str] = ()) -> None:
        """Raise `UnsupportedModel` when tensors are left that nobody took: they would change the result."""
        left = sorted(set(self._all) - self._taken - set(ignored))
        if left:
            raise UnsupportedModel(f"{self.name}: unknown tensors {', '.join(left)}")
