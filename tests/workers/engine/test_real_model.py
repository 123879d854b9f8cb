"""Promise 1 on a real model: a small edition of `python -m benchmarks exactness`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import exactness
from workers.engine.models.executor import LoadedModel
from workers.engine.models.loading.sources import Source

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def model(demo_model: Source) -> LoadedModel:
    return exactness.load("float32")


@pytest.mark.timeout(600)
def test_greedy_output_equals_transformers_generate(model: LoadedModel) -> None:
    requests = exactness.greedy_requests(model, 10, 16)
    expected = exactness.transformers_greedy(requests, "float32")
    for method, speculation in exactness.METHODS.items():
        assert exactness.decode(model, requests, speculation).tokens == expected, method


@pytest.mark.timeout(600)
def test_mixed_sampling_is_identical_by_every_method(model: LoadedModel, tmp_path: Path) -> None:
    requests = exactness.mixed_requests(model, 16, 10)
    truth = exactness.decode(model, requests, setting="batch 1").tokens
    for method, speculation in exactness.with_random_drafts(tmp_path).items():
        assert exactness.decode(model, requests, speculation, "batch 32, small pool").tokens == truth, method
    assert exactness.decode(model, requests, exactness.METHODS["draft tree"], "batch 1").tokens == truth


@pytest.mark.timeout(600)
def test_bfloat16_rows_differ_only_at_near_ties(demo_model: Source) -> None:
    """With a batch-invariant backend none differs; another machine may have near-ties, and nothing else."""
    model = exactness.load("bfloat16")
    requests = exactness.mixed_requests(model, 12, 10)
    truth = exactness.decode(model, requests, setting="batch 1").tokens
    by_id = {request.id: request for request in requests}
    for method in ("ngram", "draft tree"):
        tokens = exactness.decode(model, requests, exactness.METHODS[method]).tokens
        rows = exactness.differing(tokens, truth)
        if model.details["batch_invariant"]:
            assert rows == []
        assert all(exactness.margin(model, by_id[row], tokens[row], truth[row]) < 0.25 for row in rows)
