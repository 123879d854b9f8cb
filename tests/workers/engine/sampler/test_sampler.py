"""The sampler against a plain reference, and what makes speculation exact: rows that do not feel each other."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from scipy import stats

from workers.engine.api.errors import InvalidParams
from workers.engine.api.request import Request
from workers.engine.api.sampling_params import SamplingParams
from workers.engine.kernels.cpu.philox import gumbel_rows
from workers.engine.sampler import RowContext, perturbed_top_k, sample, validate_params
from workers.engine.state.drawn import INVALID, MASKED
from workers.engine.state.sequence import Sequence

EOS = frozenset({2, 5})


def sequence(params: SamplingParams, prompt: tuple[int, ...] = (1, 3, 3), output: tuple[int, ...] = ()) -> Sequence:
    seq = Sequence(Request("r", prompt, params), 0, EOS, 10_000)
    for token in output:
        seq.emit(token)
    return seq


def row(
    params: SamplingParams | None = None,
    prompt: tuple[int, ...] = (1, 3, 3),
    output: tuple[int, ...] = (),
    path: tuple[int, ...] = (),
) -> RowContext:
    return RowContext(sequence(params or SamplingParams(), prompt, output), path)


# A second implementation --------------------------------------------------------------------------------------------


@dataclass
class Expected:
    """What the reference allows. Where a mass lies within rounding of top_p there may be two answers."""

    tokens: list[set[int]]  # best first, one set per rank
    kept: set[int]


def reference(logits: np.ndarray, context: RowContext, k: int = 1) -> Expected:
    params, tokens = context.seq.params, [*context.seq.tokens, *context.path]
    z = logits.astype(np.float32)
    output = tokens[context.seq.num_prompt :]
    for token, bias in params.logit_bias.items():
        z[token] += np.float32(bias)
    if params.repetition_penalty != 1.0:
        for token in set(tokens):
            z[token] = z[token] / params.repetition_penalty if z[token] > 0 else z[token] * params.repetition_penalty
    for token in set(output):
        if params.presence_penalty or params.frequency_penalty:
            z[token] -= np.float32(output.count(token) * params.frequency_penalty + params.presence_penalty)
    if len(output) < params.min_tokens:
        for token in EOS | set(params.stop_token_ids):
            z[token] = -np.inf
    for word in params.bad_words:
        if tokens[len(tokens) - len(word) + 1 :] == list(word[:-1]):
            z[word[-1]] = -np.inf
    if params.temperature == 0.0:
        order = sorted(range(len(z)), key=lambda token: (-z[token], token))
        return Expected([{token} for token in order[:k]], set(order))
    shift = (z - z.max()) / np.float32(params.temperature)
    noise = gumbel_rows([context.seq.key], [len(tokens)], len(z))[0].numpy()
    answers = [_best(shift, noise, _kept(shift, params, slack), k) for slack in (0.0, -1e-6, 1e-6)]
    return Expected([set(rank) for rank in zip(*answers, strict=True)], _kept(shift, params, 0.0))


def _kept(shift: np.ndarray, params: SamplingParams, slack: float) -> set[int]:
    order = [int(token) for token in np.lexsort((np.arange(len(shift)), -shift)) if shift[token] > -np.inf]
    if params.top_k:
        order = order[: params.top_k]
    if params.top_p < 1.0:
        mass = np.cumsum(np.exp(shift[order].astype(np.float64)))
        order = order[: int(np.searchsorted(mass / mass[-1], params.top_p + slack)) + 1]
    least = params.min_p * (1 + slack)
    return {token for token in order if math.exp(shift[token]) >= least}


def _best(shift: np.ndarray, noise: np.ndarray, kept: set[int], k: int) -> list[int]:
    order = sorted(kept, key=lambda token: (-(shift[token] + noise[token]), token))
    return (order + [-1] * k)[:k]


def random_params(rng: np.random.Generator, vocab: int) -> SamplingParams:
    def maybe(chance: float, make: Callable[[], object], default: object) -> object:
        return make() if rng.random() < chance else default

    token = lambda: int(rng.integers(vocab))  # noqa: E731
    fields = {
        "temperature": maybe(0.8, lambda: float(rng.choice([0.1, 0.5, 0.7, 1.0, 1.7])), 0.0),
        "top_k": maybe(0.3, lambda: int(rng.integers(1, vocab + 3)), 0),
        "top_p": maybe(0.4, lambda: float(rng.choice([0.05, 0.5, 0.9, 0.99, rng.uniform(0.01, 1)])), 1.0),
        "min_p": maybe(0.3, lambda: float(rng.choice([0.01, 0.1, 0.5, 1.0])), 0.0),
        "repetition_penalty": maybe(0.3, lambda: float(rng.choice([0.5, 2.0])), 1.0),
        "presence_penalty": maybe(0.3, lambda: float(rng.choice([-1.0, 0.5, 1.5])), 0.0),
        "frequency_penalty": maybe(0.3, lambda: float(rng.choice([-0.5, 0.25, 1.0])), 0.0),
        "logit_bias": maybe(
            0.3, lambda: {token(): float(rng.choice([-100, -2, 1.5, 4, -np.inf])) for _ in range(2)}, {}
        ),
        "min_tokens": maybe(0.3, lambda: int(rng.integers(1, 8)), 0),
        "stop_token_ids": maybe(0.3, lambda: (token(),), ()),
        "bad_words": maybe(
            0.3, lambda: tuple((*(token() for _ in range(rng.integers(3))), token()) for _ in range(3)), ()
        ),
        "seed": int(rng.integers(2**62)),
    }
    return SamplingParams(**fields)  # type: ignore[arg-type]


def random_row(rng: np.random.Generator, vocab: int) -> RowContext:
    prompt, output, path = (tuple(rng.integers(vocab, size=rng.integers(low, 6)).tolist()) for low in (1, 0, 0))
    return row(random_params(rng, vocab), prompt, output, path)


def random_logits(rng: np.random.Generator, rows: int, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    """Every other row is rounded so that ties are common."""
    logits = rng.normal(0, 3, (rows, vocab))
    logits[::2] = np.round(logits[::2] * 4) / 4
    return torch.from_numpy(logits).float().to(dtype)


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


def wide_rows(rows: int) -> tuple[torch.Tensor, list[RowContext]]:
    vocab = 49152
    rng = np.random.default_rng(rows)
    return torch.from_numpy(rng.normal(0, 4, (rows, vocab))).bfloat16(), [random_row(rng, vocab) for _ in range(rows)]


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


# Single features ----------------------------------------------------------------------------------------------------


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


# Errors -------------------------------------------------------------------------------------------------------------


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
