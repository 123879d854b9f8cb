"""The folder that a trained EAGLE layer is written to: the published layout of the `speculators` library."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from workers.engine.speculators.eagle.checkpoint import VARIANTS, EagleConfig

SPECULATORS_VERSION = "0.9.0"
"""Of the library whose files these are."""
WEIGHTS = "model.safetensors"


def write_eagle3(
    folder: Path,
    config: EagleConfig,
    tensors: Mapping[str, torch.Tensor],
    vocabulary: torch.Tensor,
    about: Mapping[str, Any],
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Config and weights. `tensors` have the names of `speculators`; `vocabulary` [draft_vocab]: the target's ids.

    `about` needs "target" and "architecture" of the target, and "steps".
    """
    folder.mkdir(parents=True, exist_ok=True)
    stored = {name: tensor.detach().to(dtype).contiguous() for name, tensor in tensors.items()}
    known = torch.zeros(config.target_vocab, dtype=torch.bool)
    known[vocabulary] = True
    stored |= {"d2t": vocabulary - torch.arange(len(vocabulary)), "t2d": known}
    described = _described(config, about)
    _replace(folder / "config.json", lambda file: file.write_text(json.dumps(described, indent=2) + "\n"))
    _replace(folder / WEIGHTS, lambda file: save_file(stored, file))


def _replace(file: Path, write: Callable[[Path], Any]) -> None:
    partial = file.with_name(file.name + ".partial")
    write(partial)
    partial.replace(file)


def _described(config: EagleConfig, about: Mapping[str, Any]) -> dict[str, Any]:
    layer = {"model_type": "llama", **config.layer.to_diff_dict(), **_sizes(config)}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        "draft_vocab_size": config.draft_vocab,
        "target_hidden_size": None,
        # Ids name the residual stream that enters a layer, 0 being the embeddings.
        "eagle_aux_hidden_state_layer_ids": list(config.feature_layers),
        "embed_requires_grad": False,
        **{name: getattr(config, name) for name in VARIANTS},
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": about["steps"],
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": about["target"], "architectures": [about["architecture"]]},
        },
    }


def _sizes(config: EagleConfig) -> dict[str, Any]:
    layer = config.layer
    return {
        "vocab_size": config.target_vocab,
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": layer.num_attention_heads,
        "num_key_value_heads": layer.num_key_value_heads,
        "head_dim": layer.head_dim,
        "rms_norm_eps": layer.rms_norm_eps,
        "max_position_embeddings": layer.max_position_embeddings,
        "rope_parameters": layer.rope_parameters,
        "tie_word_embeddings": False,
    }
