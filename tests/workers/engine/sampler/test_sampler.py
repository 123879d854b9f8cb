"""The sampler against a plain reference, and what makes speculation exact: rows that do not feel each other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from tests.support.engine.sampling import (
    EOS,
    random_logits,
    random_row,
    reference,
    row,
    sequence,
    wide_rows,
)
from workers.engine.api.request import Request
from workers.engine.api.sampling_params import SamplingParams
from workers.engine.sampler import RowContext, perturbed_top_k, sample
from workers.engine.state.sequence import Sequence


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("vocab", "rows"), [(8, 300), (101, 150), (2500, 60)])
def test_agrees_with_the_reference(vocab: int, rows: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng([vocab, rows])
    contexts = [random_row(rng, vocab) for _ in range(rows)]
    logits = random_logits(rng, rows, vocab, dtype)
    expected = [reference(logits[i].float().numpy(), context, k=3) for i, context in enumerate(contexts)]
    tokens = sample(logits, contexts).tokens
    best, scores = perturbed_top_k(logits, contexts, 3)
    assert all(token in answer.tokens[0] for token, answer in zip(tokens, expected, strict=True))
    assert best[:, 0].tolist() == tokens
    for i, context in enumerate(contexts):
        assert all(token in rank for token, rank in zip(best[i].tolist(), expected[i].tokens, strict=False)), context
    assert ((best < 0) == scores.isneginf()).all()


# Rows do not feel each other ----------------------------------------------------------------------------------------


def test_a_row_gives_the_same_bits_in_any_company() -> None:
    logits, contexts = wide_rows(48)
    contexts = [RowContext(sequence(replace(c.seq.params, logprobs=4), tuple(c.seq.tokens)), c.path) for c in contexts]
    together, (best, scores) = sample(logits, contexts), perturbed_top_k(logits, contexts, 4)
    for subset in ([7], [20, 3], list(range(47, -1, -1)), [5] * 3 + list(range(0, 48, 5))):
        rows = [contexts[i] for i in subset]
        alone, (alone_best, alone_scores) = sample(logits[subset], rows), perturbed_top_k(logits[subset], rows, 4)
        assert alone.tokens == [together.tokens[i] for i in subset]
        assert alone.logprobs == [together.logprobs[i] for i in subset]
        assert torch.equal(alone_best, best[subset])
        assert torch.equal(alone_scores, scores[subset])


def test_the_number_of_threads_does_not_show() -> None:
    logits, contexts = wide_rows(12)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append((sample(logits, contexts), perturbed_top_k(logits, contexts, 2)[1].tolist()))
    finally:
        torch.set_num_threads(threads)
    assert results[0] == results[1] == results[2]


def test_an_assumed_path_counts_like_emitted_tokens() -> None:
    rng = np.random.default_rng(5)
    logits = random_logits(rng, 200, 40, torch.float32)
    assumed = [random_row(rng, 40) for _ in range(200)]
    committed = []
    for context in assumed:
        seq = context.seq
        output = (*seq.output, *context.path)
        committed.append(row(seq.params, tuple(seq.request.prompt_token_ids), output))
    assert sample(logits, assumed) == sample(logits, committed)


def test_filters_that_keep_everything_change_nothing() -> None:
    logits = torch.randn(30, 5000, generator=torch.Generator().manual_seed(1)) * 3
    plain = [SamplingParams(temperature=0.9, seed=seed) for seed in range(30)]
    expected = sample(logits, [row(params) for params in plain])
    for kept in (
        {"top_p": 1 - 1e-12},
        {"min_p": 1e-30},
        {"top_k": 5000},
        {"top_k": 10**20},
        {"top_k": 4999, "min_p": 1e-30},
    ):
        assert sample(logits, [row(replace(params, **kept)) for params in plain]) == expected


# Ties ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
def test_greedy_takes_the_lowest_of_equals(dtype: torch.dtype) -> None:
    logits = torch.full((4, 5000), -3.0, dtype=dtype)
    logits[1, [4321, 17, 4999]] = 2.5
    logits[2] = -torch.inf
    logits[2, 4999] = -100.0
    logits[3, 3000:] = 0.0
    logits[3, 2990:3000] = -0.0
    assert sample(logits, [row()] * 4).tokens == [0, 17, 4999, 2990]


def test_filters_keep_the_lowest_of_equals() -> None:
    flat = torch.zeros(400, 64)
    cases = {"top_k": (3, 3), "top_p": (0.5, 32)}
    for name, (value, kept) in cases.items():
        rows = [row(SamplingParams(temperature=1.0, seed=seed, **{name: value})) for seed in range(400)]
        assert set(sample(flat, rows).tokens) == set(range(kept))


def test_top_p_keeps_the_token_that_crosses() -> None:
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log().repeat(300, 1)
    for top_p, kept in {0.3: 1, 0.5: 1, 0.55: 2, 0.75: 2, 0.8: 3, 0.9: 4}.items():
        # The shares are exact, their logarithms are not: stay below the edge by more than rounding.
        rows = [row(SamplingParams(temperature=1.0, seed=seed, top_p=top_p - 1e-5)) for seed in range(300)]
        assert set(sample(logits, rows).tokens) == set(range(kept)), top_p


# Distribution -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.6, top_p=0.95),
        SamplingParams(temperature=1.5, top_k=7, min_p=0.02, presence_penalty=0.7),
    ],
)
def test_samples_follow_the_distribution(params: SamplingParams) -> None:
    draws, vocab = 6000, 20
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3)) * 1.5
    rows = [row(replace(params, seed=seed), output=(4, 9, 9)) for seed in range(draws)]
    seen = np.bincount(sample(logits.expand(draws, -1).contiguous(), rows).tokens, minlength=vocab)
    z = logits.numpy().astype(np.float64)
    z[[4, 9]] -= params.presence_penalty
    kept = sorted(reference(logits.numpy(), rows[0]).kept)
    assert seen.sum() == seen[kept].sum()
    p = np.exp(z[kept] / params.temperature)
    p /= p.sum()
    frequent = p * draws >= 5
    observed = [*seen[kept][frequent], seen[kept][~frequent].sum()]
    expected = [*p[frequent] * draws, p[~frequent].sum() * draws]
    if expected[-1] == 0:
        observed, expected = observed[:-1], expected[:-1]
    assert stats.chisquare(observed, expected).pvalue > 1e-4


def test_positions_and_samples_draw_independently() -> None:
    logits = torch.zeros(1, 1000)
    params = SamplingParams(temperature=1.0, seed=7)
    first = [sample(logits, [row(params, prompt=(1,) * length)]).tokens[0] for length in range(1, 40)]
    request = Request("r", (1,), params, sample=1)
    other = sample(logits, [RowContext(Sequence(request, 0, EOS, 100))]).tokens[0]
    assert len({*first, other}) > 35
