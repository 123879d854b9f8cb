"""A row has the same bits in any batch, whatever the architecture; other code of the process is left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.support.models.tiny import build, config_of, prompt
from workers.engine.models.layers.rowwise import Rowwise
from workers.engine.models.loading.pretrained import build_executor
from workers.engine.models.trial import Trial
from workers.engine.state.batch import Feed

COMPANY = (1, 2, 3, 4, 5, 8, 13, 34, 53, 90)

CASES: list[tuple[str, dict[str, Any]]] = [
    ("GPT2", {}),
    ("Phi3", {}),
    ("Olmo2", {"intermediate_size": 1500}),
    ("Gemma", {"hidden_size": 100, "intermediate_size": 1234}),
    ("Mixtral", {}),
    ("Qwen2Moe", {}),
    ("GraniteMoe", {}),
    ("Glm4Moe", {"moe_intermediate_size": 344, "n_routed_experts": 9}),
    ("JetMoe", {}),
    ("HunYuanMoEV1", {}),
]


@pytest.mark.parametrize("threads", [1, 3], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype, threads: None) -> None:
    varying = {name: rows for name, changes in CASES if (rows := _varying(config_of(name, **changes), dtype))}
    assert varying == {}


def _varying(config: Any, dtype: torch.dtype) -> list[int]:
    """Numbers of other rows beside which a short prompt has other logits than alone."""
    trial = Trial(build_executor(build(config, dtype), "numba", "tiny", 200))
    tokens = prompt(11, 1)

    def logits(others: int) -> torch.Tensor:
        seq, other = trial.open(tokens), trial.open(prompt(others, 2))
        found = trial.run([*([Feed(other, 0, others)] if others else []), Feed(seq, 0, len(tokens))])[-1]
        trial.cache.free(seq)
        trial.cache.free(other)
        return found

    alone = logits(0)
    return [others for others in COMPANY if not torch.equal(alone, logits(others))]


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sigmoid": torch.sigmoid,
    "sigmoid_": lambda x: x.clone().sigmoid_(),
    "silu": functional.silu,
    "silu in place": lambda x: functional.silu(x.clone(), inplace=True),
    "gelu": functional.gelu,
    "gelu by tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "softplus": functional.softplus,
    "mish": functional.mish,
    "exp2": torch.exp2,
    "pow": lambda x: x.abs() ** 1.7,
    "logaddexp": lambda x: torch.logaddexp(x, x[..., :1]),
    "rsqrt": lambda x: (x.abs() + 1).rsqrt(),
    "linear": lambda x: functional.linear(x, WEIGHT.to(x.dtype), WEIGHT[:, 0].to(x.dtype)),
    "addmm": lambda x: torch.addmm(WEIGHT[:, 1].to(x.dtype), x, WEIGHT.t().to(x.dtype)),
    "matmul": lambda x: x @ WEIGHT.t().to(x.dtype),
    "bmm": lambda x: torch.bmm(x[None].expand(2, -1, -1), WEIGHT.t().to(x.dtype).expand(2, -1, -1))[1],
}
WEIGHT = torch.randn(40, 147, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("threads", [1, 2, 3, 5], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_functions_and_products_give_each_row_its_own_bits(dtype: torch.dtype, threads: None) -> None:
    """Parts of rows of odd width, over every size at which torch starts to share the work among threads."""
    x = (torch.randn(450, 294, generator=torch.Generator().manual_seed(2)) * 2).to(dtype)[:, 147:]
    expected = {name: function(x.float()) for name, function in FUNCTIONS.items()}
    with Rowwise(torch.nn.Module()):
        for name, function in FUNCTIONS.items():
            whole = function(x)
            assert torch.allclose(whole.float(), expected[name], rtol=0.02, atol=0.2), name
            for first, count in ((0, 1), (3, 2), (5, 8), (1, 55), (0, 112), (7, 126), (2, 223), (100, 341)):
                assert torch.equal(function(x[first : first + count]), whole[first : first + count]), (name, count)
