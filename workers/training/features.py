"""What the frozen target knows at each token of a document: computed by the engine's forward pass, or kept on disk."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from workers.engine.models.executor import LoadedModel
from workers.engine.models.trial import Trial
from workers.engine.state.batch import Feed
from workers.engine.state.kv_cache import FINAL
from workers.training.documents import Document
from workers.training.errors import ChangedRun, TrainingError

BLOCK_SIZE = 16
SHARD_TOKENS = 65_536


@dataclass(frozen=True, slots=True)
class Features:
    """Of T tokens, one after the other."""

    layers: torch.Tensor
    """[T, L * N]: the residual stream entering each feature layer, side by side."""
    final: torch.Tensor
    """[T, N]: after the final norm; times the target's output matrix it is the logits of the next token."""


class FeatureSource(Protocol):
    def of(self, documents: Seq[int]) -> Features:
        """Of these documents, by index, one after the other."""
        ...


class ComputedFeatures:
    """Runs the target whenever features are asked for. Memory does not grow with the number of documents."""

    def __init__(self, target: LoadedModel, documents: Seq[Document], layers: Seq[int]) -> None:
        self._target = target
        self._documents = documents
        self._layers = tuple(layers)

    @torch.inference_mode()
    def _run(self, documents: Seq[int]) -> dict[int, torch.Tensor]:
        chosen = [self._documents[index] for index in documents]
        num_blocks = sum(-(-len(document) // BLOCK_SIZE) for document in chosen)
        trial = Trial(self._target.executor, num_blocks=num_blocks, block_size=BLOCK_SIZE)
        trial.cache.keep_hidden((*self._layers, FINAL))
        seqs = [trial.open(document.tokens) for document in chosen]
        trial.run([Feed(seq, 0, len(seq), logits=False) for seq in seqs])
        slots = torch.tensor([trial.cache.slot(seq, place) for seq in seqs for place in range(len(seq))])
        return {layer: hidden[slots] for layer, hidden in trial.cache.hidden.items()}

    def of(self, documents: Seq[int]) -> Features:
        hidden = self._run(documents)
        # Out of inference mode: autograd may not save its tensors.
        return Features(torch.cat([hidden[layer] for layer in self._layers], dim=-1).clone(), hidden[FINAL].clone())


class StoredFeatures:
    """Features in sharded safetensors files, [T, (L + 1) * N] in the target's type; made once by `store_features`."""

    def __init__(self, folder: Path, identity: str) -> None:
        index = json.loads((folder / "index.json").read_text())
        if index["identity"] != identity:
            raise ChangedRun(f"{folder}: holds features of other answers or another target: delete it, or name another")
        self._folder = folder
        self._places = [tuple(place) for place in index["places"]]
        self._final = index["hidden_size"]

    def of(self, documents: Seq[int]) -> Features:
        joined = torch.cat([self._read(*self._places[index]) for index in documents])
        return Features(joined[:, : -self._final], joined[:, -self._final :])

    def _read(self, shard: int, start: int, end: int) -> torch.Tensor:
        with safe_open(self._folder / _name(shard), framework="pt") as file:
            rows: torch.Tensor = file.get_slice("features")[start:end]
        return rows


def stored_bytes(documents: Seq[Document], target: LoadedModel, layers: Seq[int]) -> int:
    """What `store_features` would write."""
    shape = target.facts.cache_shape
    return sum(map(len, documents)) * (len(layers) + 1) * shape.hidden_size * shape.dtype.itemsize


def store_features(
    folder: Path, identity: str, target: LoadedModel, documents: Seq[Document], layers: Seq[int], *, budget: int
) -> StoredFeatures:
    """Compute the features of all documents, `budget` tokens at a time, unless `folder` holds them already.

    Raises `TrainingError` when the disk has not the room, `ChangedRun` when `folder` holds others.
    """
    if not (folder / "index.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        needed, free = stored_bytes(documents, target, layers), shutil.disk_usage(folder).free
        if needed > free:
            raise TrainingError(f"features take {needed:,} bytes, and {folder} has {free:,} left: compute them instead")
        _store(folder, identity, ComputedFeatures(target, documents, layers), documents, budget)
    return StoredFeatures(folder, identity)


def _store(folder: Path, identity: str, source: ComputedFeatures, documents: Seq[Document], budget: int) -> None:
    places: list[tuple[int, int, int]] = []
    shard, parts, size, hidden_size = 0, list[torch.Tensor](), 0, 0

    def close() -> None:
        nonlocal shard, parts, size
        save_file({"features": torch.cat(parts)}, folder / _name(shard))
        shard, parts, size = shard + 1, [], 0

    for chosen in _in_order(documents, budget):
        features = source.of(chosen)
        hidden_size = features.final.shape[1]
        for index in chosen:
            places.append((shard, size, size + len(documents[index])))
            size += len(documents[index])
        parts.append(torch.cat([features.layers, features.final], dim=-1))
        if size >= SHARD_TOKENS:
            close()
    if parts:
        close()
    # Last, and whole at once: without it the folder counts for nothing.
    described = {"identity": identity, "hidden_size": hidden_size, "places": places}
    partial = folder / "index.json.partial"
    partial.write_text(json.dumps(described))
    partial.replace(folder / "index.json")


def _in_order(documents: Seq[Document], budget: int) -> list[list[int]]:
    groups: list[list[int]] = [[]]
    room = budget
    for index, document in enumerate(documents):
        if groups[-1] and len(document) > room:
            groups.append([])
            room = budget
        groups[-1].append(index)
        room -= len(document)
    return groups


def _name(shard: int) -> str:
    return f"features-{shard:05}.safetensors"
