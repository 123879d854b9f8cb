"""EAGLE-3 as the `speculators` library computes it: its model, its checkpoint files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.drafts.eagle_runs import AUX, FEATURES, Run
from tests.support.drafts.weights import HIDDEN, LAYER, tiny_target
from tests.support.models.tiny import VOCAB
from workers.engine.attention.interface import load_attention
from workers.engine.models.layers.precision import Precision
from workers.engine.speculators.eagle.checkpoint import open_eagle
from workers.engine.speculators.eagle.layer import build_eagle
from workers.engine.state.batch import Feed
from workers.engine.state.tree import DraftTree

MISSING = "the speculators package is not installed: see CONTRIBUTING.md, pip install -e '.[dev,speculators]'"

VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "norm_before_residual": ({}, {"norm_before_residual": True}),
    "norm_before_fc": ({}, {"norm_before_fc": True}),
    "fc_norm": ({}, {"fc_norm": True, "norm_output": True}),
    "biased": ({"attention_bias": True}, {}),
    "qwen3": ({"model_type": "qwen3", "head_dim": 16}, {"draft_vocab_size": 90}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_the_library(variant: str, tmp_path: Path) -> None:
    pytest.importorskip("speculators", reason=MISSING)
    from speculators.models.eagle3 import core

    layer, options = VARIANTS[variant]
    theirs = _their_model(core, layer, options)
    theirs.save_pretrained(tmp_path)
    config, tensors = open_eagle(str(tmp_path), FEATURES, VOCAB)
    ours = build_eagle(config, tensors, tiny_target(), load_attention("numba"), Precision())

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCAB, (12,), generator=generator)
    features = torch.randn(11, 3 * HIDDEN, generator=generator)
    entries, drafted = _their_logits(theirs, features, tokens[1:])

    run = Run(ours)
    seq = run.open(0, tokens.tolist())
    outputs = run.entries([Feed(seq, 0, 11)], {seq: features})[0]
    known = torch.arange(config.draft_vocab) + (0 if theirs.d2t is None else theirs.d2t)
    torch.testing.assert_close(ours.logits(outputs)[:, known], entries, rtol=0, atol=1e-5)

    # In the library's second pass the entry behind entry i is made of output i and the token after it: a drafted node.
    short = run.open(1, tokens[:8].tolist())
    last = run.entries([Feed(short, 0, 7)], {short: features})[0][-1:]
    node = run.nodes([Feed(short, 7, 7, DraftTree((int(tokens[8]),), (-1,)))], [last])[0]
    torch.testing.assert_close(ours.logits(node)[0, known], drafted[6], rtol=0, atol=1e-5)


def _their_model(core: Any, layer: dict[str, Any], options: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    plain = {**LAYER, **layer}
    transformer = AutoConfig.for_model(plain.pop("model_type"), **plain)
    transformer._attn_implementation = "eager"
    config = core.Eagle3SpeculatorConfig(
        transformer_layer_config=transformer, **{"draft_vocab_size": VOCAB, **AUX, **options}
    )
    model = core.Eagle3DraftModel(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else noise * (1.0 if "embed" in name else 0.15))
        if model.d2t is not None:
            known = torch.randperm(VOCAB, generator=generator)[: len(model.d2t)].sort().values
            model.d2t.copy_(known - torch.arange(len(known)))
            model.t2d.zero_().index_fill_(0, known, True)
    return model


@torch.no_grad()
def _their_logits(model: Any, features: torch.Tensor, following: torch.Tensor) -> list[torch.Tensor]:
    """[T, draft vocabulary] of the entries, and of one drafted token behind each."""
    seen: list[torch.Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output[0].clone()))
    model(features[None], following[None], document_ids=torch.zeros(1, len(following), dtype=torch.long), ttt_steps=2)
    hook.remove()
    return seen
