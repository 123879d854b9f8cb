"""EAGLE-3 (arXiv 2503.01840) in training: one decoder layer on three layers of the target, drafting on its own outputs.

Row t of a document of n tokens x joins the target's features of x[t] with x[t + 1], and drafts x[t + 2]. In step j it
has the token x[t + 1 + j] and its own output of the step before in place of features, and drafts x[t + 2 + j]; the
target's probabilities come from its final state at x[t + 1 + j]. Rows whose token is none of the answer, or none of the
draft's vocabulary, have no loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from workers.engine.attention.interface import load_attention
from workers.engine.models.executor import LoadedModel
from workers.engine.models.layers.precision import Trainable
from workers.engine.speculators.eagle.checkpoint import EagleConfig
from workers.engine.speculators.eagle.layer import EagleModel, build_eagle
from workers.engine.speculators.shared.checkpoint import Tensors
from workers.training.attention import PackedAttention
from workers.training.documents import Document
from workers.training.drafter import Outcome
from workers.training.features import Features
from workers.training.layouts import write_eagle3
from workers.training.losses import LOSSES
from workers.training.target import output_rows

STEP_DECAY = 0.8
"""Weight of a depth's loss beside that of the depth before, as in the paper's code."""


@dataclass(frozen=True, slots=True)
class Eagle3Options:
    """How the drafter is built and what it minimises."""

    steps: int = 4
    """Depths that are drafted while training (training-time test)."""
    loss: str = "kl"
    intermediate_size: int | None = None
    """Of the MLP; None: the target's."""
    feature_layers: tuple[int, ...] | None = None
    """Ids name the residual stream that enters a layer; None: early, middle and late, as in the paper."""


class Eagle3Drafter:
    """Master weights in float32; under autocast the products run in bfloat16."""

    def __init__(
        self,
        target: LoadedModel,
        layer: LlamaConfig,
        options: Eagle3Options,
        vocabulary: torch.Tensor,
        tensors: Mapping[str, torch.Tensor],
    ) -> None:
        """`vocabulary` [draft_vocab] holds the target's ids, rising; `tensors` are named as on disk."""
        self._options = options
        self._vocabulary = vocabulary
        self._target_vocab = target.facts.vocab_size
        self._tensors = {name: tensor.detach().float().clone().requires_grad_() for name, tensor in tensors.items()}
        self.config = eagle3_config(target, layer, options, len(vocabulary))
        self._target = target
        self._attention = load_attention("sdpa")
        self._teacher = output_rows(target, vocabulary)
        known = torch.full((self._target_vocab,), -1)
        known[vocabulary] = torch.arange(len(vocabulary))
        self._draft_ids = known
        """Target's id -> the draft's, or -1."""
        self._loss = LOSSES[options.loss]

    @property
    def feature_layers(self) -> tuple[int, ...]:
        return self.config.feature_layers

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        return self._tensors

    def outcome(self, documents: Seq[Document], features: Features) -> Outcome:
        pack, model = _Pack(documents), self._model()
        attention = PackedAttention(pack.lengths)
        hidden = model.encode(features.layers.float())
        teacher = self._probabilities(features.final, pack)
        loss, right, rows = hidden.new_zeros(()), [], 0
        for step in range(self._options.steps):
            places = pack.rows(step)
            index = pack.index(places)
            if not len(index):
                break
            if step == 0:
                everything = torch.arange(pack.num_tokens)
                hidden = model.run(pack.after(everything, 0), pack.positions, hidden, attention.attend)[index]
            else:
                attention.step(places)
                hidden = hidden[pack.kept(step)]
                hidden = model.run(pack.after(index, step), pack.positions[index] + step, hidden, attention.attend)
            logits = model.draft_logits(hidden)
            wanted = self._draft_ids[pack.after(index, step + 1)]
            known = wanted >= 0
            each = self._loss(logits, teacher[pack.answer_place(index) + step])
            loss = loss + STEP_DECAY**step * (each * known).sum()
            right.append((logits.argmax(-1) == wanted) & known)
            rows = rows or len(index)
        return Outcome(loss, rows, tuple(right))

    def _model(self) -> EagleModel:
        """The engine's layer over the weights as they are now: it joins some of them, so it is made anew each time."""
        offsets = {"d2t": self._vocabulary - torch.arange(len(self._vocabulary))}
        tensors = Tensors("in training", {**self._tensors, **offsets}, "")
        return build_eagle(self.config, tensors, self._target, self._attention, Trainable())

    @torch.no_grad()
    def _probabilities(self, final: torch.Tensor, pack: _Pack) -> torch.Tensor:
        """[A, draft_vocab]: of what follows a prompt's last token, and each of an answer's; over the draft's tokens."""
        return (final[pack.answer_rows] @ self._teacher.T).float().softmax(-1)

    def save(self, folder: Path, about: Mapping[str, Any], dtype: torch.dtype = torch.bfloat16) -> None:
        write_eagle3(folder, self.config, self._tensors, self._vocabulary, about, dtype=dtype)


class _Pack:
    """Index arithmetic of packed documents."""

    def __init__(self, documents: Seq[Document]) -> None:
        self._documents = documents
        self.lengths = [len(document) for document in documents]
        self.num_tokens = sum(self.lengths)
        self._tokens = torch.tensor([token for document in documents for token in document.tokens])
        self.positions = torch.cat([torch.arange(length) for length in self.lengths])
        self._starts = torch.tensor([0, *self.lengths]).cumsum(0)[:-1]
        self.answer_rows = torch.cat(
            [
                torch.arange(document.num_prompt - 1, len(document)) + start
                for document, start in zip(documents, self._starts.tolist(), strict=True)
            ]
        )
        """Tokens that an answer's tokens follow on; an answer's last one is there for order's sake."""
        self._answer_place = torch.full((self.num_tokens,), -1)
        self._answer_place[self.answer_rows] = torch.arange(len(self.answer_rows))

    def rows(self, step: int) -> list[torch.Tensor]:
        """Per document, the places t whose token x[t + 2 + step] is one of the answer."""
        return [
            torch.arange(max(0, document.num_prompt - 2), max(0, document.num_prompt - 2, len(document) - 2 - step))
            for document in self._documents
        ]

    def kept(self, step: int) -> torch.Tensor:
        """Which rows of the step before there are in this one."""
        masks = []
        for before, now in zip(self.rows(step - 1), self.rows(step), strict=True):
            masks.append(torch.arange(len(before)) < len(now))
        return torch.cat(masks)

    def index(self, places: Seq[torch.Tensor]) -> torch.Tensor:
        return torch.cat([place + start for place, start in zip(places, self._starts.tolist(), strict=True)])

    def after(self, index: torch.Tensor, step: int) -> torch.Tensor:
        """Tokens x[t + 1 + step]; behind a document's end, where nobody attends to it, whatever comes."""
        return self._tokens[(index + 1 + step).clamp_max(self.num_tokens - 1)]

    def answer_place(self, index: torch.Tensor) -> torch.Tensor:
        """Row of the target's probabilities for what row t drafts in the first step: those behind x[t + 1]."""
        return self._answer_place[index + 1]


def eagle3_config(target: LoadedModel, layer: LlamaConfig, options: Eagle3Options, draft_vocab: int) -> EagleConfig:
    shape = target.facts.cache_shape
    count = shape.num_layers
    return EagleConfig(
        version=3,
        layer=layer,
        feature_layers=options.feature_layers or (2, count // 2, count - 3),
        feature_size=shape.hidden_size,
        draft_vocab=draft_vocab,
        target_vocab=target.facts.vocab_size,
        head_norms=False,
        fc_bias=False,
        # EAGLE 3.1's norms: residual streams of different layers differ in size by orders of magnitude.
        norm_before_residual=True,
        fc_norm=True,
        norm_output=True,
    )


def untrained_eagle3(
    layer: LlamaConfig, num_features: int, output_rows: torch.Tensor, seed: int
) -> dict[str, torch.Tensor]:
    """Where training starts: the target's output matrix, and small random weights for the rest."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, width = layer.hidden_size, layer.intermediate_size, layer.head_dim
    query, key = layer.num_attention_heads * width, layer.num_key_value_heads * width
    shapes = {
        "fc": (hidden, num_features * hidden),
        "layers.0.self_attn.q_proj": (query, 2 * hidden),
        "layers.0.self_attn.k_proj": (key, 2 * hidden),
        "layers.0.self_attn.v_proj": (key, 2 * hidden),
        "layers.0.self_attn.o_proj": (hidden, query),
        "layers.0.mlp.gate_proj": (inner, hidden),
        "layers.0.mlp.up_proj": (inner, hidden),
        "layers.0.mlp.down_proj": (hidden, inner),
    }
    tensors = {
        f"{name}.weight": torch.randn(shape, generator=generator) * layer.initializer_range
        for name, shape in shapes.items()
    }
    norms = ["layers.0.input_layernorm", "layers.0.hidden_norm", "layers.0.post_attention_layernorm", "norm"]
    norms += [f"fc_norm.{index}" for index in range(num_features)]
    tensors |= {f"{name}.weight": torch.ones(hidden) for name in norms}
    return tensors | {"lm_head.weight": output_rows.float()}
