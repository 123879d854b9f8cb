"""Heads and draft layers in another precision than the target's: close to the whole ones, smaller, and on record."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.drafts.eagle_runs import AUX, FEATURES, Run
from tests.support.drafts.weights import (
    HIDDEN,
    LAYER,
    eagle1_tensors,
    eagle3_tensors,
    random_heads,
    safeailab3,
    tiny_target,
    write_eagle,
    write_heads,
)
from tests.support.engine.runs import answers, mixed_requests, run
from tests.support.models.tiny import VOCAB, prompt
from workers.engine import EngineConfig, EngineCore, SpeculationConfig
from workers.engine.api.errors import InvalidConfig, UnsupportedModel
from workers.engine.attention.interface import load_attention
from workers.engine.measure.check_draft import check_draft
from workers.engine.models.executor import LoadedModel
from workers.engine.models.layers.precision import Precision, Weights, choose_precision
from workers.engine.speculators.eagle.checkpoint import open_eagle
from workers.engine.speculators.eagle.layer import EagleModel, build_eagle
from workers.engine.speculators.medusa.heads import MedusaHeads
from workers.engine.speculators.shared.checkpoint import open_draft
from workers.engine.state.batch import Feed
from workers.engine.state.tree import DraftTree

Tensors = dict[str, torch.Tensor]
WHOLE, HALF, SMALL = Precision(), Precision(torch.bfloat16), Precision(weights=Weights.INT8)


@pytest.fixture(scope="module")
def target() -> LoadedModel:
    return tiny_target()


@pytest.fixture(scope="module")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("drafts")
    eagle = write_eagle(folder / "eagle", LAYER, eagle1_tensors(near=0.02))
    return {"medusa": write_heads(folder / "medusa", random_heads(4)), "eagle": eagle}


def distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize(("precision", "close", "size"), [(HALF, 0.02, 0.5), (SMALL, 0.05, 0.3)], ids=str)
def test_heads_are_close_to_the_whole_ones(precision: Precision, close: float, size: float, tmp_path: Path) -> None:
    files = open_draft(write_heads(tmp_path, random_heads(3, 2), 2))
    whole, heads = (MedusaHeads.load(files, HIDDEN, VOCAB, p) for p in (WHOLE, precision))
    hidden = torch.randn(7, HIDDEN, generator=torch.Generator().manual_seed(1))
    for head in range(3):
        logits = heads.logits(head, hidden)
        assert 0 < distance(logits, whole.logits(head, hidden)) < close
        assert torch.equal(heads.logits(head, hidden[-1:].clone()), logits[-1:])
    assert whole.weight_bytes == 3 * 4 * (2 * (HIDDEN + 1) * HIDDEN + VOCAB * HIDDEN)
    assert heads.weight_bytes <= size * whole.weight_bytes


def logits_of(model: EagleModel) -> torch.Tensor:
    """Of six entries made of features and of one made of the layer's own output."""
    one, generator = Run(model), torch.Generator().manual_seed(5)
    tokens = torch.randint(0, VOCAB, (7,), generator=generator).tolist()
    seq = one.open(0, tokens)
    features = torch.randn(6, HIDDEN * len(model.config.feature_layers), generator=generator)
    outputs = one.entries([Feed(seq, 0, 6)], {seq: features})[0]
    drafted = one.nodes([Feed(seq, 6, 6, DraftTree((9,), (-1,)))], [outputs[-1:]])[0]
    return model.logits(torch.cat([outputs, drafted]))


EAGLES: dict[str, tuple[dict[str, Any], Tensors]] = {
    "eagle1": (LAYER, eagle1_tensors()),
    "eagle3": (safeailab3(draft_vocab_size=200, **AUX), eagle3_tensors(draft_vocab=200)),
    "eagle3, target's embeddings and head": (safeailab3(**AUX), eagle3_tensors(embed=False, lm_head=False)),
}


@pytest.mark.parametrize(("precision", "close"), [(HALF, 0.03), (SMALL, 0.1)], ids=str)
@pytest.mark.parametrize("name", EAGLES)
def test_layers_are_close_to_the_whole_ones(
    name: str, precision: Precision, close: float, target: LoadedModel, tmp_path: Path
) -> None:
    config, tensors = EAGLES[name]
    directory = write_eagle(tmp_path, config, tensors)

    def load(wanted: Precision) -> EagleModel:
        parsed, checkpoint = open_eagle(directory, FEATURES, VOCAB)
        return build_eagle(parsed, checkpoint, target, load_attention("numba"), wanted)

    whole, model = load(WHOLE), load(precision)
    expected, got = logits_of(whole), logits_of(model)
    known = expected > -torch.inf
    assert torch.equal(known, got > -torch.inf)
    assert 0 < distance(got[known], expected[known]) < close
    floats = {key: tensor for key, tensor in tensors.items() if key not in ("d2t", "t2d")}
    matrices = sum(t.numel() for key, t in floats.items() if t.ndim == 2 and key != "embed_tokens.weight")
    others = sum(t.numel() for t in floats.values()) - matrices
    assert whole.weight_bytes == 4 * (matrices + others), "what the target lends does not count"
    if not precision.is_whole:
        assert matrices + 4 * others < model.weight_bytes < 1.1 * matrices + 4 * others
    else:
        assert model.weight_bytes == 2 * (matrices + others)


def speculation(method: str, drafts: dict[str, str], **options: Any) -> SpeculationConfig:
    return SpeculationConfig(method=method, draft=drafts[method], policy="fixed", **options)


@pytest.mark.parametrize(
    "precisions", [(torch.float32, "bfloat16"), (torch.bfloat16, "float32"), (torch.bfloat16, "int8")]
)
@pytest.mark.parametrize("method", ["medusa", "eagle"])
def test_no_token_changes_between_two_precisions(
    method: str, precisions: tuple[torch.dtype, str], drafts: dict[str, str]
) -> None:
    dtype, draft_dtype = precisions
    model = tiny_target(dtype=dtype)
    config = EngineConfig(target="tiny", kv_blocks=200, max_batch=1)
    truth = run(EngineCore(config, model=model), mixed_requests(6, max_tokens=12))
    drafting = replace(config, max_batch=4, speculation=speculation(method, drafts, draft_dtype=draft_dtype))
    done = run(EngineCore(drafting, model=model), mixed_requests(6, max_tokens=12))
    assert answers(done) == answers(truth)
    assert sum(completion.stats.drafted for completion in done.values()) > 20


@pytest.mark.parametrize("method", ["medusa", "eagle"])
def test_the_report_and_the_check_say_what_was_loaded(method: str, target: LoadedModel, drafts: dict[str, str]) -> None:
    config = EngineConfig(target="tiny", kv_blocks=60)
    assert EngineCore(config, model=target).report()["draft"] is None
    found = {}
    for dtype in (None, "int8"):
        chosen = replace(config, speculation=speculation(method, drafts, row_methods=("none",), draft_dtype=dtype))
        draft = found[dtype] = EngineCore(chosen, model=target).report()["draft"]
        assert (draft["name"], draft["dtype"]) == (drafts[method], dtype or "float32")
        report = check_draft(chosen, [prompt(9, 1)], (1,), 12, repeats=1, model=target)
        assert report.identical
        assert report.draft_weight_bytes == draft["weight_bytes"]
    assert found["int8"]["weight_bytes"] < 0.3 * found[None]["weight_bytes"]
    assert found["int8"]["content_hash"] == found[None]["content_hash"]
    assert len(found[None]["content_hash"]) == 32


def test_the_hash_of_a_draft_is_that_of_its_weights(target: LoadedModel, tmp_path: Path) -> None:
    def content_hash(directory: Path) -> str:
        options = SpeculationConfig(method="medusa", draft=str(directory))
        core = EngineCore(EngineConfig("tiny", speculation=options, kv_blocks=60), model=target)
        found: str = core.report()["draft"]["content_hash"]
        return found

    tensors = random_heads(4)
    for name in ("one", "same", "other"):
        write_heads(tmp_path / name, tensors if name != "other" else {k: t + 1 for k, t in tensors.items()})
    pickled = tmp_path / "same" / "medusa_lm_head.pt"
    hashes = {name: content_hash(tmp_path / name) for name in ("one", "same", "other")}
    assert hashes["one"] == hashes["same"] != hashes["other"]
    (tmp_path / "same" / "medusa_lm_head.safetensors").unlink()
    torch.save(tensors, pickled)
    assert len({content_hash(tmp_path / "same"), *hashes.values()}) == 3


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    for method in ("none", "self"):
        with pytest.raises(
            InvalidConfig, match=f"draft_dtype is set, but method is {method}: only draft_model, medusa"
        ):
            SpeculationConfig(method=method, draft_dtype="int8")
    with pytest.raises(InvalidConfig, match="vocabulary is set, but method is medusa: only draft_model"):
        SpeculationConfig(method="medusa", draft="heads", vocabulary="text")
    with pytest.raises(InvalidConfig, match="draft_dtype must be one of float32, bfloat16, int8"):
        SpeculationConfig(method="eagle", draft="layer", draft_dtype="int4")
    small = SpeculationConfig(method="eagle", draft="layer", draft_dtype="int8")
    with pytest.raises(UnsupportedModel, match="draft layer: draft_dtype int8 runs on the CPU, the model is on cuda"):
        choose_precision(small, torch.float32, torch.device("cuda"))
    heads = write_heads(tmp_path, random_heads(2, hidden=8, vocab=257))
    options = SpeculationConfig(method="medusa", draft=heads, max_draft_tokens=2, draft_dtype="int8")
    with pytest.raises(
        UnsupportedModel, match=r"draft_dtype int8 takes float32 and bfloat16 models, not torch\.float64"
    ):
        EngineCore(EngineConfig("scripted:seed=1", speculation=options))
