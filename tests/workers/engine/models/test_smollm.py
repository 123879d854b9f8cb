"""The demo model, through the alias: a GGUF file inside an installed package."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.models.demo import ALIAS
from workers.engine.api.config import EngineConfig
from workers.engine.models.executor import LoadedModel
from workers.engine.models.loading.gguf_copy import converted
from workers.engine.models.loading.load import load_model, outline_model
from workers.engine.models.loading.sources import Source
from workers.engine.models.trial import Trial
from workers.engine.state.batch import Feed
from workers.engine.state.tree import DraftTree

pytestmark = pytest.mark.model

CHATS = [[{"role": "user", "content": text}] for text in ("What is the capital of France?", "Count to five.")]
STEPS = 12


@pytest.fixture(params=["float32", "bfloat16"])
def loaded(request: pytest.FixtureRequest) -> LoadedModel:
    model: LoadedModel = request.getfixturevalue(f"demo_{request.param}")
    return model


def test_the_alias_is_the_gguf_file_of_the_package(demo_model: Source) -> None:
    assert demo_model.is_gguf
    by_path, by_alias = (outline_model(EngineConfig(target=name)).tokenizer for name in (str(demo_model.path), ALIAS))
    assert by_path.encode("Hello, wörld 🌍") == by_alias.encode("Hello, wörld 🌍")
    assert by_path.eos_token_ids == {2}
    assert by_path.render(CHATS[0]).endswith("<|im_start|>assistant\n")


def test_gguf_weights_load_as_float32_and_print_nothing_the_second_time(
    demo_float32: LoadedModel, capfd: pytest.CaptureFixture[str]
) -> None:
    loaded = load_model(EngineConfig(target=ALIAS))
    assert capfd.readouterr() == ("", "")
    assert loaded.facts.cache_shape.dtype is torch.float32
    assert loaded.facts.max_model_len == 8192


@pytest.mark.parametrize("threads", [2], indirect=True)
def test_it_is_batch_invariant(loaded: LoadedModel) -> None:
    assert loaded.report.executor == "FusedExecutor"
    assert loaded.report.batch_invariant is True
    trial = Trial(loaded.executor, num_blocks=128)
    tokens = loaded.tokenizer.encode(loaded.tokenizer.render(CHATS[0]))
    alone = trial.chain(tokens)
    seq, other = trial.open(tokens), trial.open(range(100, 700))
    half = len(tokens) // 2
    first = trial.run([Feed(other, 0, 600, logits=False), Feed(seq, 0, half)])[1]
    second = trial.run([Feed(seq, half, len(tokens))])[0]
    assert torch.equal(torch.cat((first, second)), alone[[half - 1, -1]])

    branching = trial.open(tokens[:-2], room=4)
    tree = DraftTree((3, tokens[-2], tokens[-2], tokens[-1]), (-1, -1, 0, 1))
    assert torch.equal(trial.run([Feed(branching, 0, len(tokens) - 2, tree)])[0][[0, 2, 4]], alone[-3:])


@torch.inference_mode()
def test_greedy_tokens_are_those_of_transformers(demo_model: Source, demo_float32: LoadedModel) -> None:
    loaded = demo_float32
    prompts = [loaded.tokenizer.encode(loaded.tokenizer.render(chat)) for chat in CHATS]
    trial = Trial(loaded.executor, num_blocks=64)
    sequences = [trial.open(tokens, room=STEPS) for tokens in prompts]
    feeds = [Feed(seq, 0, len(seq)) for seq in sequences]
    for _ in range(STEPS):
        for seq, logits in zip(sequences, trial.run(feeds), strict=True):
            seq.tokens.append(int(logits[-1].argmax()))
        feeds = [Feed(seq, len(seq) - 1, len(seq)) for seq in sequences]
    model: Any = AutoModelForCausalLM.from_pretrained(converted(demo_model).path)
    for tokens, seq in zip(prompts, sequences, strict=True):
        ids = torch.tensor([tokens])
        # Without a mask, generate takes every <|im_end|> of the prompt for padding.
        mask = torch.ones_like(ids)
        expected = model.generate(
            ids, attention_mask=mask, max_new_tokens=STEPS, do_sample=False, eos_token_id=None, pad_token_id=2
        )
        assert seq.tokens == expected[0].tolist()
