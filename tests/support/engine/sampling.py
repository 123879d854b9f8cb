"""A second implementation of the sampler, and random rows to compare the two on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from workers.engine.api.request import Request
from workers.engine.api.sampling_params import SamplingParams
from workers.engine.kernels.cpu.philox import gumbel_rows
from workers.engine.sampler import RowContext
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


def wide_rows(rows: int) -> tuple[torch.Tensor, list[RowContext]]:
    vocab = 49152
    rng = np.random.default_rng(rows)
    return torch.from_numpy(rng.normal(0, 4, (rows, vocab))).bfloat16(), [random_row(rng, vocab) for _ in range(rows)]
