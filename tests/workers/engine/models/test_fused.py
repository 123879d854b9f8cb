"""The fused executor: the numbers of transformers' modules, and a row's value whatever its company."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.engine.trees import tree_of
from tests.support.models.tiny import VOCAB, build, config_of, prompt
from workers.engine.attention.interface import load_attention
from workers.engine.models.executor import Executor, ModelOutput
from workers.engine.models.executors.fused import FusedExecutor, covers
from workers.engine.models.executors.hf import HuggingFaceExecutor
from workers.engine.models.layers.precision import Precision
from workers.engine.models.loading.checks import probe
from workers.engine.models.loading.invariance import self_test
from workers.engine.models.trial import Trial
from workers.engine.state.batch import Feed
from workers.engine.state.kv_cache import FINAL
from workers.engine.state.tree import DraftTree

DTYPES = [torch.float32, torch.bfloat16]
# Widths that are no multiple of a vector, biases, few and many heads.
SHAPES: list[tuple[str, dict[str, Any]]] = [
    ("Llama", {}),
    ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("Qwen2", {"hidden_size": 40, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 50}),
    ("Qwen3", {"num_key_value_heads": 6}),
    ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    ("Mistral", {"sliding_window": 11}),
    ("Qwen3", {"sliding_window": 11, "use_sliding_window": True, "max_window_layers": 1}),
]


def executor_of(kind: type[Any], config: Any, dtype: torch.dtype, attention: str = "numba") -> Executor:
    model = build(config, dtype)
    shape = probe(model, "tiny", 200).shape
    executor: Executor = kind(model, load_attention(attention), shape, 200, Precision(dtype))
    return executor


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "changes"), SHAPES)
def test_logits_are_those_of_the_modules(name: str, changes: dict[str, Any], dtype: torch.dtype) -> None:
    config = config_of(name, **changes)
    tokens = prompt(60, 1)
    expected = Trial(executor_of(HuggingFaceExecutor, config, dtype)).chain(tokens)
    got = Trial(executor_of(FusedExecutor, config, dtype)).chain(tokens)
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4 if dtype is torch.float32 else 0.1)


@pytest.mark.parametrize("threads", [1, 3], indirect=True)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "changes"), SHAPES)
def test_a_rows_logits_do_not_depend_on_its_company(name: str, changes: dict[str, Any], dtype: torch.dtype) -> None:
    trial = Trial(executor_of(FusedExecutor, config_of(name, **changes), dtype), num_blocks=64)
    tokens = prompt(33, 1)
    alone = trial.chain(tokens)

    seq, other, third = trial.open(tokens), trial.open(prompt(150, 2)), trial.open(prompt(19, 3), room=8)
    tree = tree_of([(5, 6, 7), (8, 9)])
    first = trial.run([Feed(third, 0, 19, tree), Feed(seq, 0, 13), Feed(other, 0, 100)])[1]
    second = trial.run([Feed(other, 100, 150), Feed(seq, 13, 32)])[1]
    third_pass = trial.run([Feed(seq, 32, 33)])[0]
    assert torch.equal(torch.cat((first, second, third_pass)), alone[[12, 31, 32]])

    branching = trial.open(tokens[:-2], room=4)
    siblings = DraftTree((3, tokens[-2], tokens[-2], tokens[-1]), (-1, -1, 0, 1))
    rows = trial.run([Feed(branching, 0, 31, siblings), Feed(trial.open(prompt(70, 4)), 0, 70)])[0]
    assert torch.equal(rows[[0, 2, 4]], alone[-3:])


@pytest.mark.parametrize("kind", [FusedExecutor, HuggingFaceExecutor])
def test_hidden_states_are_kept_where_asked(kind: type[Any]) -> None:
    config = config_of("Llama")
    tokens = prompt(10, 1)
    with torch.inference_mode():
        states = build(config)(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    trial = Trial(executor_of(kind, config, torch.float32))
    trial.cache.keep_hidden((0, 2, FINAL))
    seq = trial.open(tokens)
    trial.run([Feed(seq, 0, 6)])
    trial.run([Feed(seq, 6, 10)])
    slots = [trial.cache.slot(seq, position) for position in range(10)]
    for layer in (0, 2, FINAL):
        torch.testing.assert_close(trial.cache.hidden[layer][slots], states[layer][0], rtol=0, atol=1e-4)


def test_only_what_is_covered_exactly_is_fused() -> None:
    assert covers(build(config_of("Qwen3")))
    assert not covers(build(config_of("Llama", hidden_act="gelu")))
    assert not covers(build(config_of("Llama"), torch.float64))
    assert not covers(build(config_of("Gemma")))


def test_the_model_gives_its_layers_up() -> None:
    model = build(config_of("Llama"))
    FusedExecutor(model, load_attention("numba"), probe(model, "tiny", 200).shape, 200, Precision())
    assert not any("layers" in name for name, _ in model.named_parameters())


def test_self_test_reports_invariance() -> None:
    config = config_of("Llama")
    assert self_test(executor_of(FusedExecutor, config, torch.float32)) == ()


def test_self_test_reports_what_varies() -> None:
    class Moody(FusedExecutor):
        """Adds the number of rows to every logit."""

        def forward(self, batch: Any, cache: Any) -> Any:
            return ModelOutput(super().forward(batch, cache).logits + len(batch.input_ids))

    assert self_test(executor_of(Moody, config_of("Llama"), torch.float32)) == ("company", "chunks", "tree")


def test_vocab_size_counts_the_columns_of_the_logits() -> None:
    executor = executor_of(FusedExecutor, config_of("Llama"), torch.float32)
    assert executor.facts.vocab_size == VOCAB == Trial(executor).chain([1, 2, 3]).shape[1]
