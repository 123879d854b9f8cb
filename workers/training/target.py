"""What training asks of the frozen target besides its forward pass: its output matrix, and the sizes of a layer."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig

from workers.engine.models.executor import LoadedModel
from workers.training.errors import TrainingError


@torch.no_grad()
def output_rows(target: LoadedModel, tokens: torch.Tensor) -> torch.Tensor:
    """[len(tokens), N], in the target's type: rows of its output matrix. Raises `TrainingError` if it lends none."""
    lender = target.lender
    if lender is None:
        raise TrainingError(f"{target.name}: {target.facts.executor} cannot lend its output matrix to a drafter")
    shape = target.facts.cache_shape
    # Whatever layout the matrix has, unit vectors times it are its columns, to the bit.
    units = torch.eye(shape.hidden_size, dtype=shape.dtype, device=shape.device)
    return lender.project(units).T[tokens].contiguous()


def draft_layer(config: Any, *, intermediate_size: int | None = None) -> LlamaConfig:
    """A decoder layer of the target's sizes, with its rotary embedding. `config` is the target's, of transformers."""
    text = config.get_text_config()
    heads = int(text.num_attention_heads)
    return LlamaConfig(
        vocab_size=int(text.vocab_size),
        hidden_size=int(text.hidden_size),
        intermediate_size=intermediate_size or int(text.intermediate_size),
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=int(getattr(text, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(text, "head_dim", None) or text.hidden_size // heads),
        rms_norm_eps=float(getattr(text, "rms_norm_eps", 1e-6)),
        max_position_embeddings=int(text.max_position_embeddings),
        rope_parameters=getattr(text, "rope_parameters", None),
        tie_word_embeddings=False,
    )
