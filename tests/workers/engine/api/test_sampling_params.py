from __future__ import annotations

from typing import Any

import pytest

from workers.engine import SamplingParams
from workers.engine.api.errors import InvalidParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0), ("max_tokens", 2.5), ("max_tokens", "many"), ("max_tokens", True), ("min_tokens", -1),
        ("temperature", -1), ("temperature", "hot"), ("temperature", float("nan")), ("temperature", float("inf")),
        ("top_p", 0), ("top_p", 1.1), ("top_k", -1), ("min_p", 2), ("repetition_penalty", 0), ("presence_penalty", 3),
        ("frequency_penalty", -3), ("n", 0), ("logprobs", 21), ("seed", 2**64), ("ignore_eos", 1),
        ("stop", 3), ("stop", [1]), ("stop", [""]), ("stop_token_ids", ["x"]), ("stop_token_ids", [1.7]),
        ("bad_words", 3), ("bad_words", [[]]), ("bad_words", [["x"]]), ("logit_bias", 3), ("logit_bias", {"a": 1}),
        ("logit_bias", {-1: 1.0}), ("logit_bias", {1: float("nan")}),
    ],
)  # fmt: skip
def test_every_bad_value_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidParams, match=name):
        SamplingParams(**{name: value})


def test_values_from_yaml_json_and_parquet_compare_equal() -> None:
    loose: Any = {"max_tokens": 8.0, "temperature": 1, "stop": "x", "stop_token_ids": [1], "logit_bias": {"5": 1}}
    strict = SamplingParams(max_tokens=8, temperature=1.0, stop=("x",), stop_token_ids=(1,), logit_bias={5: 1.0})
    assert SamplingParams(**loose) == strict
