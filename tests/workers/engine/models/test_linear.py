"""The bits of a row do not depend on how many rows a product has."""

from __future__ import annotations

import pytest
import torch

from workers.engine.models.layers.linear import pack

ROWS = 600


@pytest.mark.parametrize("threads", [1, 2], indirect=True)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("n", "k"), [(576, 1536), (896, 64), (2048, 2048), (17_000, 64)])
def test_a_row_is_the_same_among_any_number(n: int, k: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(n)
    layer = pack([torch.randn(n, k, generator=generator).to(dtype)])
    x = torch.randn(ROWS, k, generator=generator).to(dtype)
    alone = torch.cat([layer(x[i : i + 1]) for i in range(ROWS)])
    for count in (2, 3, 16, 17, 32, 33, 40, 64, 65, 127, 128, 129, 130, 160, 200, 256, 257, 512, 599, ROWS):
        assert torch.equal(layer(x[:count]), alone[:count]), count
    assert torch.equal(layer(x.view(3, 200, k)), alone.view(3, 200, n))
