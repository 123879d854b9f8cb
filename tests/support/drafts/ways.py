"""Ways of speculating that fit a small Llama, and how to spoil them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.drafts.weights import (
    LAYER,
    eagle1_tensors,
    eagle3_tensors,
    random_heads,
    safeailab3,
    write_eagle,
    write_heads,
)
from tests.support.models.tiny import config_of, save

Options = Callable[[Path], dict[str, Any]]
"""Writes what a mistake needs into a directory; the options of the speculation."""


def eagle(config: dict[str, Any] | None = None, drop: str = "", pickled: bool = False, **tensors: Any) -> Options:
    def write(directory: Path) -> dict[str, Any]:
        found = {**eagle3_tensors(), **tensors}
        found.pop(drop, None)
        return {"method": "eagle", "draft": write_eagle(directory, config or safeailab3(), found, pickled=pickled)}

    return write


def medusa(drop: str = "", tree: str = "", hidden: int = 48, **options: Any) -> Options:
    def write(directory: Path) -> dict[str, Any]:
        heads = random_heads(hidden=hidden)
        heads.pop(drop, None)
        draft = write_heads(directory, heads)
        if tree:
            (directory / "medusa_tree.json").write_text(tree)
        return {"method": "medusa", "draft": draft, **options}

    return write


def spoilt(good: Options, name: str, content: str | None) -> Options:
    """With a file of the draft replaced, or removed."""

    def write(directory: Path) -> dict[str, Any]:
        options = good(directory)
        (directory / name).unlink() if content is None else (directory / name).write_text(content)
        return options

    return write


def skipping(content: str | None = None, **options: Any) -> Options:
    def write(directory: Path) -> dict[str, Any]:
        if content is not None:
            (directory / "skip.json").write_text(content)
            return {"method": "self", "skip_file": str(directory / "skip.json")}
        return {"method": "self", **options}

    return write


def draft_model(shift: int = 0, context: int = 256, **options: Any) -> Options:
    """With the target's vocabulary, or one whose ids are shifted."""

    def write(directory: Path) -> dict[str, Any]:
        config = config_of("Llama", num_hidden_layers=1, max_position_embeddings=context)
        return {"method": "draft_model", "draft": save(directory, config, shift=shift), **options}

    return write


OTHER_MODEL = json.dumps(
    {"target": "x", "content_hash": "abc", "skip": ["attn.1"], "acceptance": 0.5, "cost": 0.5, "draft_tokens": 3,
     "predicted_speedup": 1.1}
)  # fmt: skip


GOOD: dict[str, Options] = {
    "eagle 3": eagle(),
    "eagle 3, pickled": eagle(pickled=True),
    "eagle 3, own vocabulary": eagle(safeailab3(draft_vocab_size=100), **eagle3_tensors(draft_vocab=100)),
    "eagle 1": lambda directory: {"method": "eagle", "draft": write_eagle(directory, LAYER, eagle1_tensors())},
    "medusa": medusa(),
    "medusa, int8": medusa(draft_dtype="int8"),
    "self": skipping(skip=("attn.1", "mlp.5")),
    "draft_model": draft_model(),
    "draft_model, mapped": draft_model(shift=7),
    "draft_model, int8": draft_model(draft_dtype="int8"),
    "draft_model, itself in int8": lambda _: {"method": "draft_model", "draft": "target", "draft_dtype": "int8"},
    "all that need no draft": lambda _: {"method": "suffix", "row_methods": ("ngram", "none")},
}
