"""Medusa's heads (Cai et al. 2024, arXiv 2401.10774) and their published checkpoint layout.

Head k reads the target's last hidden state h, after the final norm, and guesses the token k places after the one that
the target's own head predicts: n residual blocks h + SiLU(W h + b), then a matrix onto the vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn.functional import silu

from workers.engine.api.errors import UnsupportedModel
from workers.engine.models.layers.precision import Precision
from workers.engine.models.layers.quantised import AnyLinear
from workers.engine.models.loading.refusals import refusing
from workers.engine.speculators.shared.checkpoint import DraftFiles, Tensors

WEIGHTS = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")


@dataclass(frozen=True, slots=True)
class MedusaHead:
    blocks: tuple[AnyLinear, ...]
    output: AnyLinear


class MedusaHeads:
    """The heads, ready to run."""

    def __init__(self, heads: list[MedusaHead], dtype: torch.dtype, content_hash: str) -> None:
        self.content_hash = content_hash
        self.weight_bytes = sum(linear.nbytes for head in heads for linear in (*head.blocks, head.output))
        self._heads = heads
        self._dtype = dtype

    def __len__(self) -> int:
        return len(self._heads)

    @classmethod
    def load(cls, files: DraftFiles, hidden_size: int, vocab_size: int, precision: Precision) -> MedusaHeads:
        """Read a checkpoint. Raises `UnsupportedModel`, naming the tensor, where it does not fit the target."""
        tensors = files.tensors(WEIGHTS)
        with refusing(files.name):
            num_heads, num_blocks = _counts(files, tensors)
            return cls.build(tensors, (num_heads, num_blocks), (hidden_size, vocab_size), precision)

    @classmethod
    def build(
        cls, tensors: Tensors, counts: tuple[int, int], sizes: tuple[int, int], precision: Precision
    ) -> MedusaHeads:
        """Heads of tensors named as in `untrained_heads`: `counts` of heads and of blocks in each, `sizes` N and V.

        With the precision `Trainable`, gradients flow from `logits` to the tensors.
        """
        heads = [_head(tensors, head, counts[1], *sizes, precision) for head in range(counts[0])]
        tensors.finish()
        return cls(heads, precision.dtype, tensors.content_hash)

    def logits(self, head: int, hidden: torch.Tensor) -> torch.Tensor:
        """[B, N] of any type -> [B, V] of the heads' own."""
        hidden = hidden.to(self._dtype)
        for block in self._heads[head].blocks:
            hidden = hidden + silu(block(hidden))
        return self._heads[head].output(hidden)


def _counts(files: DraftFiles, tensors: Tensors) -> tuple[int, int]:
    """Heads, and blocks of each. Published configs name fewer heads than there are: the weights have the last word."""
    num_heads, num_blocks = (_count(files, key) for key in ("medusa_num_heads", "medusa_num_layers"))
    found = {int(key.split(".")[0]) for key in tensors.keys if key.split(".")[0].isdigit()}
    return max(num_heads, len(found)), num_blocks


def _count(files: DraftFiles, key: str) -> int:
    value = files.config.get(key)
    if value is None:
        raise UnsupportedModel(f"{files.name}/config.json: {key} is missing")
    if type(value) is not int or value < 0:
        raise UnsupportedModel(f"{files.name}/config.json: {key} is {value!r}, no count")
    return value


def _head(tensors: Tensors, head: int, num_blocks: int, hidden: int, vocab: int, precision: Precision) -> MedusaHead:
    def ready(key: str, *shape: int) -> torch.Tensor:
        return precision.ready(tensors.take(key, *shape))

    blocks = tuple(
        precision.linear(
            [ready(f"{head}.{block}.linear.weight", hidden, hidden)], [ready(f"{head}.{block}.linear.bias", hidden)]
        )
        for block in range(num_blocks)
    )
    return MedusaHead(blocks, precision.linear([ready(f"{head}.{num_blocks}.weight", vocab, hidden)]))


def untrained_heads(lm_head: torch.Tensor, num_heads: int, num_blocks: int = 1) -> dict[str, torch.Tensor]:
    """Where training starts: every head is the target's own, [V, N], behind blocks that do nothing."""
    hidden = lm_head.shape[1]
    tensors = {}
    for head in range(num_heads):
        for block in range(num_blocks):
            tensors[f"{head}.{block}.linear.weight"] = lm_head.new_zeros(hidden, hidden)
            tensors[f"{head}.{block}.linear.bias"] = lm_head.new_zeros(hidden)
        tensors[f"{head}.{num_blocks}.weight"] = lm_head.detach().clone()
    return tensors


def save_heads(directory: Path, tensors: Mapping[str, torch.Tensor], *, num_blocks: int, base_model: str) -> None:
    """Write heads in the published layout. `tensors` are named as in `untrained_heads`."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "medusa_num_heads": len({key.split(".")[0] for key in tensors}),
        "medusa_num_layers": num_blocks,
        "base_model_name_or_path": base_model,
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, directory / WEIGHTS[0])
