"""8-bit drafts: close to the model, the same for a row in any company, smaller, and no token changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engine.runs import mixed_requests, run
from tests.support.models.tiny import build, config_of, prompt, save
from workers.engine import EngineConfig, EngineCore, SpeculationConfig
from workers.engine.api.errors import InvalidConfig, UnsupportedModel
from workers.engine.kernels.cpu.quantise import ZERO, quantise_rows
from workers.engine.models.layers.precision import Weights
from workers.engine.models.layers.quantised import QuantisedLinear
from workers.engine.models.loading.invariance import self_test
from workers.engine.models.loading.load import load_draft, load_model
from workers.engine.models.loading.pretrained import build_executor
from workers.engine.models.trial import Trial


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [7, 48, 577])
def test_rows_become_codes(dtype: torch.dtype, width: int) -> None:
    x = torch.randn(9, width).to(dtype)
    x[3] = 0.0
    x[4] *= 1000.0
    codes, scales = quantise_rows(x)
    again = (codes.float() - ZERO) * scales
    assert codes[3].eq(ZERO).all()
    assert ((again - x.float()).abs() <= 0.5001 * scales + 1e-30).all()
    assert (codes.float() - ZERO).abs().amax(1)[[0, 4]].tolist() == [127, 127]
    alone, _ = quantise_rows(x[4:5].clone())
    assert torch.equal(codes[4:5], alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_products_are_close_and_do_not_depend_on_the_company(dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(rows)
    weight, bias, x = torch.randn(40, 96).to(dtype), torch.randn(40).to(dtype), torch.randn(rows, 96).to(dtype)
    linear = QuantisedLinear(weight, bias)
    expected = x.float() @ weight.float().T + bias.float()
    assert (linear(x).float() - expected).norm() < 0.02 * expected.norm()
    assert torch.equal(linear(x)[-1:], linear(x[-1:].clone()))
    assert linear.nbytes < 40 * 96 + 40 * 10


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Phi3", "GPTNeoX"])
def test_quantised_models_are_close_to_the_whole_ones(name: str) -> None:
    """Fused layers and transformers' own alike."""
    whole = build_executor(build(config_of(name)), "numba", "tiny", 128)
    small = build_executor(build(config_of(name)), "numba", "tiny", 128, Weights.INT8)
    tokens = prompt(40, 1)
    expected, got = Trial(whole).chain(tokens), Trial(small).chain(tokens)
    assert 0 < (got - expected).norm() / expected.norm() < 0.15
    assert small.weight_bytes < 0.62 * whole.weight_bytes
    assert not self_test(small)


def drafting(target: str, **options: Any) -> EngineConfig:
    speculation = SpeculationConfig(**{"method": "draft_model", "draft": "target", "policy": "fixed", **options})
    return EngineConfig(target=target, speculation=speculation, kv_blocks=80, block_size=4, max_batch=8)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("llama"), config_of("Llama"))


def test_an_8_bit_copy_of_the_target_drafts_well(llama: str) -> None:
    done = run(EngineCore(drafting(llama, draft_dtype="int8")), mixed_requests(12, max_tokens=20))
    reached = sum(sum(c.stats.reached_per_depth) for c in done.values())
    assert sum(c.stats.accepted for c in done.values()) > 0.8 * reached


def test_a_draft_in_another_precision_is_a_model_of_its_own(llama: str) -> None:
    target = load_model(EngineConfig(target=llama))
    whole, half, small = (
        load_draft(drafting(llama, draft_dtype=dtype), target) for dtype in ("float32", "bfloat16", "int8")
    )
    assert [draft.report.dtype for draft in (whole, half, small)] == ["float32", "bfloat16", "int8"]
    sizes = [draft.report.weight_bytes for draft in (whole, half, small)]
    assert sizes[0] == target.report.weight_bytes == 2 * sizes[1]
    assert sizes[2] < 0.62 * sizes[0]
    assert half.facts.cache_shape.dtype is torch.bfloat16
    assert load_draft(drafting(llama), target) is target


def test_what_cannot_be_quantised_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="draft_dtype is set, but method is ngram: only draft_model, medusa, eagle"):
        SpeculationConfig(method="ngram", draft_dtype="int8")
    with pytest.raises(InvalidConfig, match="draft_dtype must be one of float32, bfloat16, int8"):
        SpeculationConfig(method="draft_model", draft="target", draft_dtype="int4")
    scripted = "scripted:seed=1"
    with pytest.raises(InvalidConfig, match="a scripted model has no weights"):
        load_draft(drafting(scripted, draft_dtype="int8"), load_model(EngineConfig(target=scripted)))
    with pytest.raises(UnsupportedModel, match=r"draft tiny: draft_dtype int8 takes float32 and bfloat16 models"):
        build_executor(build(config_of("Llama"), torch.float64), "reference", "tiny", 128, Weights.INT8)
