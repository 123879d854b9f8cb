"""Promise 1 on a real model: a small edition of `python -m benchmarks exactness`."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import exactness
from workers.engine.api.config import METHODS
from workers.engine.models.executor import LoadedModel

pytestmark = pytest.mark.model


AGAINST_TRANSFORMERS = ("none", "threshold", "draft dynamic", "int8 copy", "self")
AGAINST_PLAIN = ("ngram", "suffix", "draft chain", "draft tree", "self tree", "medusa", "eagle dynamic")
"""Each method against one of the two; every shape of every draft is in the study, and in test_exactness."""


@pytest.mark.timeout(600)
def test_greedy_output_equals_transformers_generate(demo_float32: LoadedModel) -> None:
    requests = exactness.greedy_requests(demo_float32, 5, 12)
    expected = exactness.transformers_greedy(requests, "float32")
    for method in AGAINST_TRANSFORMERS:
        assert exactness.decode(demo_float32, requests, exactness.METHODS[method]).tokens == expected, method


@pytest.mark.timeout(600)
def test_mixed_sampling_is_identical_by_every_method(demo_float32: LoadedModel, tmp_path: Path) -> None:
    requests = exactness.mixed_requests(demo_float32, 8, 8)
    truth = exactness.decode(demo_float32, requests, setting="batch 1").tokens
    methods = exactness.with_random_drafts(tmp_path)
    assert {methods[name].method for name in (*AGAINST_TRANSFORMERS, *AGAINST_PLAIN)} == set(METHODS)
    for name in AGAINST_PLAIN:
        assert exactness.decode(demo_float32, requests, methods[name], "batch 32, small pool").tokens == truth, name
    assert exactness.decode(demo_float32, requests[:4], methods["draft tree"], "batch 1").tokens == {
        request.id: truth[request.id] for request in requests[:4]
    }


@pytest.mark.timeout(600)
def test_bfloat16_rows_differ_only_at_near_ties(demo_bfloat16: LoadedModel) -> None:
    """With a batch-invariant backend none differs; another machine may have near-ties, and nothing else."""
    model = demo_bfloat16
    requests = exactness.mixed_requests(model, 8, 8)
    truth = exactness.decode(model, requests, setting="batch 1").tokens
    by_id = {request.id: request for request in requests}
    for method in ("ngram", "draft tree"):
        tokens = exactness.decode(model, requests, exactness.METHODS[method]).tokens
        rows = exactness.differing(tokens, truth)
        if model.report.batch_invariant:
            assert rows == []
        assert all(exactness.margin(model, by_id[row], tokens[row], truth[row]) < 0.25 for row in rows)
