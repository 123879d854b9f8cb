"""Packed execution of many architectures equals transformers' plain forward pass; what it cannot honour is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.engine.trees import tree_of
from tests.support.models.tiny import ACCEPTED, LONGROPE, VOCAB, WEIGHED, build, config_of, prompt
from workers.engine.api.errors import InvalidConfig, UnsupportedModel
from workers.engine.models.executor import Executor
from workers.engine.models.executors.hf import HuggingFaceExecutor
from workers.engine.models.loading.checks import check_config, check_length, context_limit, probe
from workers.engine.models.loading.pretrained import build_executor
from workers.engine.models.trial import Trial
from workers.engine.state.batch import Feed

FUSED = {"Llama", "Mistral", "Qwen2", "Qwen3"}
LIMIT = 200


def load(config: Any, attention: str = "numba", dtype: torch.dtype = torch.float32) -> tuple[Executor, Any]:
    """Executor of a tiny model, and the untouched model."""
    check_all(config)
    return build_executor(build(config, dtype), attention, "tiny", LIMIT), build(config, dtype)


@torch.inference_mode()
def plain(model: Any, tokens: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize("name", ACCEPTED)
def test_chunks_ragged_batches_and_trees_give_plain_logits(name: str) -> None:
    executor, model = load(config_of(name))
    assert (type(executor).__name__ == "FusedExecutor") == (name in FUSED)
    trial = Trial(executor)
    long, short, root = prompt(50, 1), prompt(7, 2), prompt(11, 3)
    a, b, c = trial.open(long), trial.open(short), trial.open(root, room=8)
    tree = tree_of([(5, 6, 7), (5, 8), (9, 6, 10)])

    trial.run([Feed(a, 0, 20, logits=False), Feed(b, 0, 3)])
    got_a, got_b, got_c = trial.run([Feed(a, 20, 50), Feed(b, 3, 7), Feed(c, 0, 11, tree)])

    close(got_a[-1], plain(model, long)[-1])
    close(got_b[-1], plain(model, short)[-1])
    close(got_c[0], plain(model, root)[-1])
    for node in range(len(tree)):
        path = [tree.tokens[ancestor] for ancestor in tree.path(node)]
        close(got_c[1 + node], plain(model, root + path)[-1])


@pytest.mark.parametrize("attention", ["reference", "sdpa", "numba"])
def test_every_backend_runs_a_whole_model(attention: str) -> None:
    executor, model = load(config_of("Phi3"), attention)
    tokens = prompt(40, 4)
    close(Trial(executor).chain(tokens), plain(model, tokens))


def test_float64_models_run_on_the_reference_backend() -> None:
    executor, model = load(config_of("Qwen2"), "reference", torch.float64)
    tokens = prompt(20, 5)
    assert isinstance(executor, HuggingFaceExecutor)
    torch.testing.assert_close(Trial(executor).chain(tokens), plain(model, tokens), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("Lfm2", {}, "is a hybrid with layers of kind conv"),
        ("DeepseekV3", {}, "MLA"),
        ("GPTNeo", {}, "AttentionInterface"),
        ("Mamba2", {}, "has layers of kind linear_attention"),
        ("Phi3", LONGROPE, "more than 64 positions: set max_model_len to 64 or less"),
    ],
)  # fmt: skip
def test_what_packed_attention_does_not_honour_is_refused_from_the_config(
    name: str, changes: dict[str, Any], message: str
) -> None:
    config = config_of(name, **changes)
    with pytest.raises(UnsupportedModel, match=f"tiny \\({config.model_type}\\).*{message}"):
        check_all(config)


def check_all(config: Any) -> None:
    check_config(config, type(build(config)), "tiny")
    check_length(config, "tiny", LIMIT)


def test_encoder_decoders_are_refused() -> None:
    from transformers import BartForCausalLM

    with pytest.raises(UnsupportedModel, match="encoder-decoder"):
        check_config(config_of("Bart"), BartForCausalLM, "tiny")


def test_a_window_beyond_the_context_limit_does_no_harm() -> None:
    executor, model = load(config_of("Mistral", sliding_window=LIMIT))
    tokens = prompt(30, 6)
    close(Trial(executor).chain(tokens), plain(model, tokens))


@pytest.mark.parametrize(("name", "changes"), WEIGHED, ids=[name for name, _ in WEIGHED])
def test_windows_softcaps_and_sinks_are_honoured(name: str, changes: dict[str, Any]) -> None:
    """In chunks, in a tree and alone, on every backend, far beyond the window."""
    config = config_of(name, **changes)
    executor, model = load(config)
    tokens, root = prompt(90, 1), prompt(41, 3)
    expected = plain(model, tokens)
    for attention in ("reference", "sdpa"):
        close(Trial(build_executor(build(config), attention, "tiny", LIMIT)).chain(tokens), expected)
    trial = Trial(executor)
    a, b = trial.open(tokens), trial.open(root, room=8)
    tree = tree_of([(5, 6, 7), (5, 8), (9, 6, 10)])
    trial.run([Feed(a, 0, 20, logits=False)])
    trial.cache.commit(a, 20)
    trial.run([Feed(a, 20, 60, logits=False), Feed(b, 0, 40, logits=False)])
    trial.cache.commit(a, 60)
    trial.cache.commit(b, 40)
    got_a, got_b = trial.run([Feed(a, 60, 90), Feed(b, 40, 41, tree)])
    close(got_a[-1], expected[-1])
    for node in range(len(tree)):
        path = [tree.tokens[ancestor] for ancestor in tree.path(node)]
        close(got_b[1 + node], plain(model, root + path)[-1])
    trial.cache.check()


def test_a_window_that_only_the_mask_knows_is_refused_beyond_it() -> None:
    config = config_of("Phimoe", sliding_window=64)
    check_all(config)
    with pytest.raises(UnsupportedModel, match="keeps a sliding window of 64 tokens from its attention function: set"):
        probe(build(config), "tiny", LIMIT)
    assert probe(build(config), "tiny", 64).shape.window is None


def test_a_window_that_no_mask_knows_is_refused_beyond_it() -> None:
    config = config_of("Olmoe", sliding_window=64)
    with pytest.raises(UnsupportedModel, match="attention functions alone: set max_model_len to 64"):
        probe(build(config), "tiny", LIMIT)


def test_context_limit_is_the_models_or_the_shorter_one_asked_for() -> None:
    config = config_of("Llama")
    assert context_limit(config, "tiny", None) == 256
    assert context_limit(config, "tiny", 100) == 100
    with pytest.raises(InvalidConfig, match="max_model_len is 257, but tiny has 256 positions"):
        context_limit(config, "tiny", 257)
    assert context_limit(config, "tiny", None, 100) == 100
    assert context_limit(config, "tiny", None, 1000) == 256
    assert context_limit(config_of("Bloom"), "tiny", None, 100) == 100
    with pytest.raises(InvalidConfig, match="set max_model_len"):
        context_limit(config_of("Bloom"), "tiny", None)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.shape == expected.shape
    assert expected.shape[-1] == VOCAB
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)
