"""Heads of Medusa: files that do not fit are refused by name, before anything runs; what was written loads again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.drafts.weights import (
    HIDDEN,
    random_heads,
    write_heads,
)
from tests.support.models.tiny import VOCAB
from workers.engine.api.errors import ModelNotFound, UnsupportedModel
from workers.engine.models.layers.precision import Precision
from workers.engine.speculators.medusa.heads import MedusaHeads, save_heads
from workers.engine.speculators.shared.checkpoint import open_draft

Tensors = dict[str, torch.Tensor]
LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


def load_heads(directory: Path) -> MedusaHeads:
    return MedusaHeads.load(open_draft(str(directory)), HIDDEN, VOCAB, Precision())


@pytest.mark.parametrize("pickled", [False, True])
def test_heads_survive_the_file(pickled: bool, tmp_path: Path) -> None:
    tensors = random_heads(3, 2)
    save_heads(tmp_path, tensors, num_blocks=2, base_model="org/base")
    if pickled:
        (tmp_path / "medusa_lm_head.safetensors").unlink()
        torch.save(tensors, tmp_path / "medusa_lm_head.pt")
    config = json.loads((tmp_path / "config.json").read_text())
    assert config == {"medusa_num_heads": 3, "medusa_num_layers": 2, "base_model_name_or_path": "org/base"}
    hidden = torch.eye(HIDDEN)
    heads = load_heads(tmp_path)
    assert len(heads) == 3
    again = tmp_path / "again"
    save_heads(again, tensors, num_blocks=2, base_model="org/base")
    for head in range(3):
        torch.testing.assert_close(heads.logits(head, hidden), load_heads(again).logits(head, hidden), rtol=0, atol=0)


def test_published_configs_name_fewer_heads_than_there_are(tmp_path: Path) -> None:
    write_heads(tmp_path, random_heads(5))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "medusa_num_heads": 2}))
    assert len(load_heads(tmp_path)) == 5


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: t.pop("1.0.linear.bias"), r"tensor 1\.0\.linear\.bias \[48\] is missing"),
        (lambda t: t.update({"0.1.weight": torch.zeros(9, 48)}), r"0\.1\.weight is \[9, 48\], \[320, 48\] is needed"),
        (lambda t: t.update({"extra": torch.zeros(1)}), "unknown tensors extra"),
    ],
)
def test_heads_that_do_not_fit(spoil: Callable[[Tensors], Any], message: str, tmp_path: Path) -> None:
    tensors = random_heads(2)
    spoil(tensors)
    write_heads(tmp_path, tensors)
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 2, "medusa_num_layers": 1}')
    with pytest.raises(UnsupportedModel, match=message):
        load_heads(tmp_path)


def test_pickles_are_not_executed(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "exploded",)

    (tmp_path / "config.json").write_text('{"medusa_num_heads": 1, "medusa_num_layers": 1}')
    torch.save({"0.0.linear.weight": Bomb()}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(UnsupportedModel, match="cannot be read as a file of tensors alone"):
        load_heads(tmp_path)
    assert not (tmp_path / "exploded").exists()


def test_drafts_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no such directory"):
        open_draft(str(tmp_path / "nowhere"))
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 1, "medusa_num_layers": 1}')
    with pytest.raises(ModelNotFound, match=r"none of medusa_lm_head\.safetensors, medusa_lm_head\.pt"):
        load_heads(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "medusa_lm_head.safetensors").write_bytes(b"not a safetensors file")
    with pytest.raises(UnsupportedModel, match="cannot be read"):
        load_heads(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("[]", "config.json: holds list, not keys and values"),
        ("{", "config.json: "),
        ('{"medusa_num_heads": "x", "medusa_num_layers": 1}', "medusa_num_heads is 'x', no count"),
        ('{"medusa_num_heads": 2, "medusa_num_layers": -1}', "medusa_num_layers is -1, no count"),
        ('{"medusa_num_layers": 1}', "medusa_num_heads is missing"),
        (LFS_POINTER, "config.json: a git-lfs pointer"),
    ],
)
def test_configs_of_heads_that_are_none(config: str, message: str, tmp_path: Path) -> None:
    write_heads(tmp_path, random_heads(2))
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(UnsupportedModel, match=message):
        load_heads(tmp_path)


def test_heads_that_were_not_fetched(tmp_path: Path) -> None:
    write_heads(tmp_path, random_heads(2))
    (tmp_path / "medusa_lm_head.safetensors").write_text(LFS_POINTER)
    with pytest.raises(UnsupportedModel, match=r"medusa_lm_head\.safetensors: a git-lfs pointer"):
        load_heads(tmp_path)
