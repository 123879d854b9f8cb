"""Each feature of the sampler by itself, and the rows and parameters that it refuses."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.support.engine.sampling import (
    row,
    wide_rows,
)
from workers.engine.api.errors import InvalidParams
from workers.engine.api.sampling_params import SamplingParams
from workers.engine.kernels.cpu.philox import gumbel_rows
from workers.engine.sampler import perturbed_top_k, sample, validate_params
from workers.engine.state.drawn import INVALID, MASKED


def test_perturbed_scores_are_log_probabilities_plus_noise() -> None:
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(2)) * 2
    greedy, sampled = row(), row(SamplingParams(temperature=0.8, seed=3))
    filtered = row(SamplingParams(temperature=0.8, top_k=4, seed=3))
    tokens, scores = perturbed_top_k(logits, [greedy, sampled, filtered], 6)
    log_p = torch.log_softmax(logits[0], -1)
    assert tokens[0].tolist() == log_p.topk(6).indices.tolist()
    torch.testing.assert_close(scores[0], log_p.topk(6).values, atol=1e-5, rtol=0)
    noise = gumbel_rows([sampled.seq.key], [3], 500)[0]
    expected = (torch.log_softmax(logits[1] / 0.8, -1) + noise).topk(6)
    assert tokens[1].tolist() == expected.indices.tolist()
    torch.testing.assert_close(scores[1], expected.values, atol=1e-5, rtol=0)
    allowed = logits[2].topk(4).indices
    expected = torch.log_softmax(logits[2, allowed] / 0.8, -1) + noise[allowed]
    assert tokens[2, :4].tolist() == allowed[expected.argsort(descending=True)].tolist()
    torch.testing.assert_close(scores[2, :4], expected.sort(descending=True).values, atol=1e-5, rtol=0)
    assert tokens[2, 4:].tolist() == [-1, -1]
    assert scores[2, 4:].isneginf().all()


def test_more_candidates_extend_fewer() -> None:
    logits, contexts = wide_rows(8)
    tokens, scores = perturbed_top_k(logits, contexts, 5)
    for k in (1, 2, 4):
        fewer = perturbed_top_k(logits, contexts, k)
        assert torch.equal(fewer[0], tokens[:, :k])
        assert torch.equal(fewer[1], scores[:, :k])


def test_min_tokens_masks_what_would_end_the_sequence() -> None:
    logits = torch.tensor([[0.0, 1.0, 9.0, 2.0, 8.0, 7.0]])
    params = SamplingParams(min_tokens=3, stop_token_ids=(4,))
    assert sample(logits, [row(params)]).tokens == [3]
    assert sample(logits, [row(params, output=(1, 1))]).tokens == [3]
    assert sample(logits, [row(params, output=(1,), path=(1,))]).tokens == [3]
    assert sample(logits, [row(params, output=(1,), path=(1, 1))]).tokens == [2]


def test_bad_words_mask_their_last_token_after_the_others() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]])
    params = SamplingParams(bad_words=((1, 3, 5), (4,)))
    assert sample(logits, [row(params, prompt=(1,), output=(3,))]).tokens == [3]
    assert sample(logits, [row(params, prompt=(1,), path=(3,))]).tokens == [3]
    assert sample(logits, [row(params, prompt=(0,), path=(1, 3))]).tokens == [3]
    assert sample(logits, [row(params, prompt=(3,), path=(1,))]).tokens == [5]
    assert sample(logits, [row(params, prompt=(3,))]).tokens == [5]


def test_penalties_by_hand() -> None:
    logits = torch.tensor([[4.0, -1.0, 3.9, 0.0]])
    assert sample(logits, [row(SamplingParams(repetition_penalty=1.1), prompt=(0,))]).tokens == [2]
    assert sample(logits, [row(SamplingParams(presence_penalty=0.2), prompt=(0,))]).tokens == [0]
    assert sample(logits, [row(SamplingParams(presence_penalty=0.2), output=(0,))]).tokens == [2]
    params = SamplingParams(frequency_penalty=0.06)
    assert sample(logits, [row(params, output=(0,))]).tokens == [0]
    assert sample(logits, [row(params, output=(0,), path=(0,))]).tokens == [2]


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(4)) * 3
    logits[3, 3:] = -torch.inf
    params = SamplingParams(temperature=0.5, logit_bias={7: 50.0}, top_p=0.9, logprobs=3)
    plain = replace(params, logit_bias={}, logprobs=5)
    contexts = [row(params), row(), row(replace(params, logprobs=0)), row(plain)]
    result = sample(logits, contexts)
    raw = torch.log_softmax(logits.double(), -1)
    assert result.tokens[0] == 7
    assert result.logprobs[1] is None
    for i, count in ((0, 3), (2, 0), (3, 3)):
        entry = result.logprobs[i]
        assert entry is not None
        assert entry.token_id == result.tokens[i]
        assert entry.logprob == pytest.approx(raw[i, entry.token_id].item(), abs=1e-5)
        best = raw[i].topk(count)
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)
        assert all(value == entry.logprob for token, value in entry.top if token == entry.token_id)
    assert sample(logits[:2], [row(), row()]).logprobs == []


def test_layout_of_the_logits_does_not_matter() -> None:
    logits = torch.randn(6, 900, generator=torch.Generator().manual_seed(6))
    contexts = [row(), *(row(SamplingParams(temperature=1.0, top_p=0.8, seed=seed)) for seed in range(5))]
    expected = sample(logits, contexts)
    assert sample(logits.t().contiguous().t(), contexts) == expected
    padded = torch.full((12, 1000), 9.0)
    padded[::2, :900] = logits
    assert sample(padded[::2, :900], contexts) == expected


def test_a_smaller_vocabulary_passes_over_unknown_ids() -> None:
    params = SamplingParams(
        logit_bias={90: 5.0, 3: 5.0}, repetition_penalty=1.5, presence_penalty=0.1, min_tokens=9, stop_token_ids=(80,),
        bad_words=((70,),),
    )  # fmt: skip
    logits = torch.zeros(1, 4)
    assert perturbed_top_k(logits, [row(params, prompt=(60, 1), output=(99, 0))], 1)[0].tolist() == [[3]]


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-6])
def test_the_coldest_temperatures_choose_among_exact_ties_only(temperature: float) -> None:
    logits = torch.tensor([1.0, 30.0, 30.0, 29.0]).repeat(200, 1)
    rows = [row(SamplingParams(temperature=temperature, seed=seed)) for seed in range(200)]
    assert set(sample(logits, rows).tokens) == {1, 2}


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(top_p=0.5, temperature=1.0)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rows_without_an_answer_are_told_apart(params: SamplingParams, dtype: torch.dtype) -> None:
    logits = torch.randn(5, 2000, generator=torch.Generator().manual_seed(8)).to(dtype)
    expected = sample(logits, [row(params)] * 5).tokens
    logits[1] = -torch.inf
    logits[2, 1500] = math.nan
    logits[3, 1999] = -math.nan
    logits[4, 0] = math.inf
    assert sample(logits, [row(params)] * 5).tokens == [expected[0], MASKED, INVALID, INVALID, INVALID]
    tokens, scores = perturbed_top_k(logits, [row(params)] * 5, 2)
    assert tokens[0, 0] == expected[0]
    assert tokens[1:].tolist() == [[MASKED] * 2, *[[INVALID] * 2] * 3]
    assert not (scores[1:] > -math.inf).any()


def test_a_row_may_be_masked_by_its_parameters() -> None:
    params = SamplingParams(logit_bias=dict.fromkeys(range(4), -math.inf), logprobs=1)
    sampled = sample(torch.zeros(2, 4), [row(params), row(SamplingParams(logprobs=0))])
    assert sampled.tokens == [MASKED, 0]
    assert sampled.logprobs[0] is None
    assert sampled.logprobs[1] is not None


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit 2 rows"):
        sample(torch.zeros(1, 4), [row(), row()])
    with pytest.raises(ValueError, match="at least 1"):
        perturbed_top_k(torch.zeros(1, 4), [row()], 0)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(logit_bias={100: 1.0}), "logit_bias has token id 100; the model's vocabulary is 0..99"),
        (SamplingParams(stop_token_ids=(-1,)), "stop_token_ids has token id -1"),
        (SamplingParams(bad_words=((1, 2), (3, 400))), "bad_words has token id 400"),
        (SamplingParams(logit_bias={1: math.inf}), "logit_bias has 1: inf"),
        (SamplingParams(logit_bias={1: 1e39}), "logit_bias has 1: 1e"),
    ],
)
def test_parameters_outside_the_vocabulary_are_refused(params: SamplingParams, message: str) -> None:
    validate_params(SamplingParams(logit_bias={99: -math.inf}, stop_token_ids=(0,), bad_words=((5,),)), 100)
    with pytest.raises(InvalidParams, match=message):
        validate_params(params, 100)
