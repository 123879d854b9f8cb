"""A tiny target that answers, and a drafter in training for it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaForCausalLM

from tests.support.drafts.weights import tiny_model
from tests.support.models.tiny import VOCAB, config_of, prompt
from workers.engine import EngineConfig
from workers.engine.api.request import Request
from workers.engine.api.sampling_params import SamplingParams
from workers.engine.core import EngineCore
from workers.engine.models.executor import LoadedModel
from workers.engine.models.facts import ModelReport
from workers.engine.models.loading.pretrained import build_executor
from workers.engine.text.tokenizer import ByteTokenizer
from workers.training.documents import Document
from workers.training.eagle3 import Eagle3Drafter, Eagle3Options, untrained_eagle3
from workers.training.features import ComputedFeatures
from workers.training.target import draft_layer, output_rows
from workers.training.trainer import Trainer, TrainOptions
from workers.training.vocabulary import frequent_tokens

CONFIG = EngineConfig(target="tiny", max_model_len=200, kv_blocks=200)
PROMPTS = [prompt(length, seed) for seed, length in enumerate((5, 9, 3, 14, 7, 2, 11, 6))]


def answered(target: LoadedModel, prompts: Seq[Seq[int]] = PROMPTS, tokens: int = 24) -> list[Document]:
    """The prompts with the target's greedy answers."""
    core = EngineCore(CONFIG, model=target)
    params = SamplingParams(max_tokens=tokens, temperature=0.0)
    for index, ids in enumerate(prompts):
        assert core.add(Request(index, tuple(ids), params)) is None
    done: dict[Any, Any] = {}
    while core.has_work:
        done |= {completion.request_id: completion for completion in core.step()}
    return [Document((*ids, *done[index].token_ids), len(ids)) for index, ids in enumerate(prompts)]


def drafter_for(
    target: LoadedModel, documents: Seq[Document], *, draft_vocab: int = VOCAB, steps: int = 3, noise: float = 0.0
) -> Eagle3Drafter:
    layer = draft_layer(config_of("Llama", rms_norm_eps=1e-6))
    vocabulary = frequent_tokens(documents, draft_vocab, VOCAB)
    tensors = untrained_eagle3(layer, 3, output_rows(target, vocabulary), seed=0)
    generator = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        tensors[name] = tensor + noise * torch.randn(tensor.shape, generator=generator)
    return Eagle3Drafter(target, layer, Eagle3Options(steps=steps), vocabulary, tensors)


def trainer_for(
    folder: Path, target: LoadedModel, documents: Seq[Document], drafter: Eagle3Drafter | None = None, **options: Any
) -> Trainer:
    folder.mkdir(parents=True, exist_ok=True)
    drafter = drafter or drafter_for(target, documents)
    features = ComputedFeatures(target, documents, drafter.feature_layers)
    settings = {"epochs": 3, "pack_tokens": 60, "lr": 5e-3, "save_seconds": 0.0, "autocast": False, **options}
    return Trainer(folder, drafter, documents, features, TrainOptions(**settings), {"documents": len(documents)})


def sure_model() -> LlamaForCausalLM:
    """A target that is sure of its next token: a drafter can learn what it will say."""
    model = tiny_model(0.02)
    with torch.no_grad():
        model.lm_head.weight.mul_(4)
    return model


def sure_target() -> LoadedModel:
    executor = build_executor(sure_model(), "numba", "tiny", 256)
    return LoadedModel(executor, ByteTokenizer(VOCAB), "tiny", "0", ModelReport(attention="numba"))
