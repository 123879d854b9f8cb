"""Forward passes in pieces, in company and in trees equal the papers' formulas on whole sequences.

The same modules can be trained: gradients reach every tensor, and what is trained is what the engine runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.drafts.eagle_runs import AUX, FEATURES, INPUT_NORM, NORMS, Run
from tests.support.drafts.reference import Eagle, medusa_logits
from tests.support.drafts.weights import (
    HIDDEN,
    LAYER,
    eagle1_tensors,
    eagle3_tensors,
    library3,
    random_heads,
    safeailab3,
    tiny_model,
    tiny_target,
    write_eagle,
    write_heads,
)
from tests.support.models.tiny import VOCAB
from workers.engine.attention.interface import load_attention
from workers.engine.models.layers.precision import Precision, Trainable
from workers.engine.speculators.eagle.checkpoint import open_eagle
from workers.engine.speculators.eagle.layer import EagleModel, build_eagle
from workers.engine.speculators.medusa.heads import MedusaHeads
from workers.engine.speculators.shared.checkpoint import Tensors, open_draft
from workers.engine.state.batch import Feed
from workers.engine.state.kv_cache import FINAL, CacheShape
from workers.engine.state.tree import DraftTree

QWEN = {
    f"layers.0.self_attn.{part}_norm.weight": 1 + 0.2 * torch.randn(16, generator=torch.Generator().manual_seed(7))
    for part in "qk"
}
TOKENS = [3, 5, 7, 11, 13, 17]


def biases(name: str, rows: dict[str, int]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return {f"{name}.{part}_proj.bias": torch.randn(n, generator=generator) * 0.3 for part, n in rows.items()}


@dataclass
class Case:
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    version: int = 3
    layer: str = "layers.0"
    pickled: bool = False
    flags: dict[str, bool] = field(default_factory=dict)


def library(tensors: dict[str, torch.Tensor] | None = None, **flags: bool) -> Case:
    return Case(library3(**AUX, **flags), tensors or eagle3_tensors("layers.0"), flags=flags)


CASES = {
    "eagle1": Case(LAYER, eagle1_tensors(), version=1),
    "eagle1, no bias, pickled": Case({**LAYER, "bias": False}, eagle1_tensors(bias=False), version=1, pickled=True),
    "eagle1, own embeddings": Case(
        LAYER, eagle1_tensors() | {"embed_tokens.weight": torch.ones(VOCAB, HIDDEN).cumsum(0) / VOCAB}, version=1
    ),
    "eagle3": Case(safeailab3(**AUX), eagle3_tensors(), layer="midlayer"),
    "eagle3, target's embeddings and head": Case(
        safeailab3(**AUX), eagle3_tensors(embed=False, lm_head=False), layer="midlayer"
    ),
    "eagle3, reduced vocabulary": Case(
        safeailab3(draft_vocab_size=100, **AUX), eagle3_tensors(draft_vocab=100), layer="midlayer", pickled=True
    ),
    "eagle3, nested layer ids, biased": Case(
        safeailab3(eagle_config=AUX, attention_bias=True),
        eagle3_tensors(extra=biases("midlayer.self_attn", {"q": 48, "k": 16, "v": 16})),
        layer="midlayer",
    ),
    "library": library(),
    "library, norm_before_residual": library(norm_before_residual=True),
    "library, norm_before_fc": library(eagle3_tensors("layers.0", extra=INPUT_NORM), norm_before_fc=True),
    "library, fc_norm": library(eagle3_tensors("layers.0", extra=NORMS), fc_norm=True),
    "library, norm_output": library(norm_output=True),
    "library, qwen3, everything": Case(
        library3(
            {"model_type": "qwen3", "head_dim": 16},
            draft_vocab_size=90, norm_before_residual=True, norm_output=True, **AUX
        ),
        eagle3_tensors("layers.0", draft_vocab=90, head_dim=16, extra=QWEN),
        flags={"norm_before_residual": True, "norm_output": True},
    ),
    "library, four auxiliary layers": Case(
        library3(eagle_aux_hidden_state_layer_ids=[5, 0, 3, 1]), eagle3_tensors("layers.0", features=4)
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_target()


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


def build_case(case: Case, directory: Path, target: Any, attention: str = "numba") -> EagleModel:
    config, tensors = open_eagle(
        write_eagle(directory, case.config, case.tensors, pickled=case.pickled), FEATURES, VOCAB
    )
    return build_eagle(config, tensors, target, load_attention(attention), Precision())


def reference(case: Case, model: Any) -> Eagle:
    embed = case.tensors.get("embed_tokens.weight", model.model.embed_tokens.weight.detach())
    return Eagle(case.tensors, embed, case.version, case.layer, **case.flags)


@pytest.mark.parametrize(
    ("name", "attention"),
    [*((name, "numba") for name in CASES), ("eagle1", "sdpa"), ("eagle3, reduced vocabulary", "sdpa")],
)
def test_eagle_equals_the_paper(name: str, attention: str, tmp_path: Path, target: Any, model: Any) -> None:
    case = CASES[name]
    eagle, expected = build_case(case, tmp_path, target, attention), reference(case, model)
    run, generator = Run(eagle), torch.Generator().manual_seed(5)
    tokens = torch.randint(0, VOCAB, (2, 14), generator=generator).tolist()
    long, short = run.open(0, tokens[0]), run.open(1, tokens[1][:6])
    width = HIDDEN * len(eagle.config.feature_layers)
    features = {seq: torch.randn(len(seq) - 1, width, generator=generator) for seq in (long, short)}

    first = run.entries([Feed(long, 0, 5)], features)[0]
    second, other = run.entries([Feed(long, 5, 13), Feed(short, 0, 5)], features)
    for seq, outputs in ((long, torch.cat([first, second])), (short, other)):
        whole = expected.outputs(expected.encode(features[seq]), seq.tokens[1:])
        torch.testing.assert_close(outputs, whole, rtol=0, atol=1e-5)

    tree = DraftTree((7, 9, 11, 13, 15), (-1, -1, 0, 1, 1))
    feeds = [
        Feed(long, 13, 13, DraftTree(tree.tokens[:2], tree.parents[:2])),
        Feed(short, 5, 5, DraftTree((7,), (-1,))),
    ]
    level, chain = run.nodes(feeds, [second[-1:].expand(2, -1), other[-1:]])
    deeper = run.nodes([Feed(long, 13, 13, tree, first_node=2)], [level[[0, 1, 1]]])[0]
    for path, outputs in (
        ([7, 11], torch.stack([second[-1], level[0], deeper[0]])),
        ([9, 13], torch.stack([second[-1], level[1], deeper[1]])),
        ([9, 15], torch.stack([second[-1], level[1], deeper[2]])),
    ):
        torch.testing.assert_close(outputs, expected.draft(features[long], long.tokens, path), rtol=0, atol=1e-5)
    torch.testing.assert_close(chain[0], expected.draft(features[short], short.tokens, [7])[1], rtol=0, atol=1e-5)

    lm_head = case.tensors.get("lm_head.weight", model.lm_head.weight.detach())
    logits, wanted = eagle.logits(deeper), expected.logits(deeper, lm_head)
    known = torch.arange(len(lm_head)) + case.tensors.get("d2t", torch.zeros(len(lm_head), dtype=torch.long))
    torch.testing.assert_close(logits[:, known], wanted, rtol=0, atol=1e-4)
    unknown = torch.ones(VOCAB, dtype=torch.bool).index_fill_(0, known, False)
    assert bool((logits[:, unknown] == -torch.inf).all())


def test_a_narrow_draft_for_a_wide_target(tmp_path: Path, target: Any) -> None:
    """target_hidden_size differs from hidden_size: only fc sees the target's width."""
    case = Case(
        safeailab3(hidden_size=24, target_hidden_size=HIDDEN, head_dim=8, **AUX),
        eagle3_tensors(hidden=24, head_dim=8),
        layer="midlayer",
    )
    run = Run(build_case(case, tmp_path, target))
    seq = run.open(0, [3, 5, 7, 11])
    features = torch.randn(3, 3 * HIDDEN, generator=torch.Generator().manual_seed(0))
    outputs = run.entries([Feed(seq, 0, 3)], {seq: features})[0]
    expected = Eagle(case.tensors, case.tensors["embed_tokens.weight"], 3, "midlayer")
    torch.testing.assert_close(outputs, expected.outputs(expected.encode(features), [5, 7, 11]), rtol=0, atol=1e-5)


def test_the_default_layers_are_early_middle_and_late(tmp_path: Path) -> None:
    shape = CacheShape.uniform(12, 2, 8, torch.float32, torch.device("cpu"), HIDDEN)
    config, _ = open_eagle(write_eagle(tmp_path / "3", safeailab3(), eagle3_tensors()), shape, VOCAB)
    assert config.feature_layers == (2, 6, 9)
    config, _ = open_eagle(write_eagle(tmp_path / "1", LAYER, eagle1_tensors()), shape, VOCAB)
    assert config.feature_layers == (FINAL,)


@pytest.mark.parametrize(("num_heads", "num_blocks"), [(1, 1), (4, 1), (3, 2)])
def test_medusa_equals_the_paper(num_heads: int, num_blocks: int, tmp_path: Path) -> None:
    tensors = random_heads(num_heads, num_blocks)
    files = open_draft(write_heads(tmp_path, tensors, num_blocks))
    heads = MedusaHeads.load(files, HIDDEN, VOCAB, Precision())
    assert len(heads) == num_heads
    hidden = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1))
    for head in range(num_heads):
        expected = medusa_logits(tensors, head, num_blocks, hidden)
        torch.testing.assert_close(heads.logits(head, hidden), expected, rtol=0, atol=1e-5)


def learnable(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies that want a gradient, of all that hold weights."""
    return {
        key: tensor.clone().requires_grad_() if tensor.is_floating_point() else tensor
        for key, tensor in tensors.items()
    }


def logits_of(eagle: EagleModel, features: torch.Tensor) -> torch.Tensor:
    run = Run(eagle)
    seq = run.open(0, TOKENS)
    outputs = run.entries([Feed(seq, 0, len(TOKENS) - 1)], {seq: features})[0]
    return eagle.logits(outputs)


@pytest.mark.parametrize(
    "name", ["eagle3", "eagle3, reduced vocabulary", "library, fc_norm", "library, qwen3, everything"]
)
def test_gradients_flow_through_the_eagle_layer(name: str, tmp_path: Path) -> None:
    case, target = CASES[name], tiny_target()
    config, found = open_eagle(write_eagle(tmp_path / "a", case.config, case.tensors), FEATURES, VOCAB)
    weights = learnable({key: found.take(key, *found._all[key].shape) for key in found.keys})
    eagle = build_eagle(config, Tensors("trained", weights, ""), target, load_attention("sdpa"), Trainable())
    features = torch.randn(
        len(TOKENS) - 1, HIDDEN * len(config.feature_layers), generator=torch.Generator().manual_seed(2)
    )
    logits = logits_of(eagle, features)
    with torch.inference_mode():
        torch.testing.assert_close(logits, logits_of(build_case(case, tmp_path / "b", target), features))
    known = logits[:, torch.isfinite(logits[0])]
    known.log_softmax(-1)[:, 0].sum().backward()  # type: ignore[no-untyped-call]
    for key, tensor in weights.items():
        if tensor.requires_grad:
            assert tensor.grad is not None, key
            assert bool(tensor.grad.any()), key


def test_gradients_flow_through_medusa_heads(tmp_path: Path) -> None:
    tensors = random_heads(2, 2)
    weights = learnable(tensors)
    heads = MedusaHeads.build(Tensors("trained", weights, ""), (2, 2), (HIDDEN, VOCAB), Trainable())
    engine = MedusaHeads.load(open_draft(write_heads(tmp_path, tensors, 2)), HIDDEN, VOCAB, Precision())
    hidden = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(1))
    for head in range(2):
        logits = heads.logits(head, hidden)
        torch.testing.assert_close(logits, engine.logits(head, hidden))
        logits.log_softmax(-1)[:, 0].sum().backward()  # type: ignore[no-untyped-call]
    for key, tensor in weights.items():
        assert tensor.grad is not None, key
        assert bool(tensor.grad.any()), key
