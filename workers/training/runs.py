"""One training, put together: answers, target, drafter, features, trainer and evaluation, from a few settings."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from workers.engine.api.config import EngineConfig
from workers.engine.models.loading.load import load_model, outline_model
from workers.engine.models.loading.outline import Outline
from workers.training.documents import Document, Documents, read_documents
from workers.training.eagle3 import Eagle3Drafter, Eagle3Options, eagle3_config, untrained_eagle3
from workers.training.errors import ChangedRun, UnusableData
from workers.training.evaluation import Evaluation
from workers.training.features import ComputedFeatures, FeatureSource, store_features, stored_bytes
from workers.training.packing import packs
from workers.training.simulation import Simulation, simulate
from workers.training.target import draft_layer, output_rows
from workers.training.trainer import Evaluated, Point, Trainer, TrainOptions
from workers.training.vocabulary import coverage, frequent_tokens

ANSWERS, ABOUT = "answers.parquet", "about.json"
"""Files of a folder that `nightdraft distill` wrote."""
BEST, CANDIDATE = "drafter", "candidate"
"""Folders in that of a training: the best drafter so far, and the one that is being evaluated."""


@dataclass(frozen=True, slots=True)
class Eagle3Run:
    """What decides an EAGLE-3 training."""

    data: Path
    """A folder of `nightdraft distill`."""
    out: Path
    """Folder of the training; the best drafter lies in out/drafter."""
    drafter: Eagle3Options = field(default_factory=Eagle3Options)
    training: TrainOptions = field(default_factory=TrainOptions)
    draft_vocab: int = 4096
    max_tokens: int = 1024
    """Length of a document at most; answers are cut there."""
    held_out: float = 0.05
    """Share of the prompts that nothing is learned from."""
    num_served: int = 64
    """Held-out prompts that each evaluation serves at most."""
    served_tokens: int = 128
    """Tokens of their answers at most."""
    features: Path | None = None
    """Where the target's features are kept; None: they are computed whenever they are needed."""
    dtype: str = "auto"
    """Of the target."""


@dataclass(frozen=True, slots=True)
class Opening:
    """What a training is about to do."""

    target: str
    num_documents: int
    answer_tokens: int
    num_held_out: int
    unusable: Mapping[str, int]
    coverage: float
    """Share of the answers' tokens that the draft's vocabulary holds."""
    num_parameters: int
    feature_bytes: int
    """On disk; 0 where they are computed."""
    resumed_step: int
    num_steps: int


class Eagle3Training:
    """Raises `UnusableData`, `ChangedRun` or `TrainingError` when it is opened; and what loading the target raises."""

    def __init__(self, run: Eagle3Run) -> None:
        about = read_about(run.data)
        config = EngineConfig(target=about["target"], dtype=run.dtype, max_model_len=int(about["max_model_len"]))
        outline = outline_model(config)
        if not isinstance(outline, Outline):
            raise UnusableData(f"{run.data}: its answers are those of {about['target']}, which has no layers to read")
        if outline.content_hash != about["content_hash"]:
            raise ChangedRun(
                f"{run.data}: its answers are those of a model {about['target']} with other weights (hash"
                f" {about['content_hash']}, here {outline.content_hash}): distill anew"
            )
        vocab_size = outline.facts.vocab_size
        documents = read_documents(
            [run.data / ANSWERS],
            vocab_size=vocab_size,
            max_tokens=min(run.max_tokens, int(about["max_model_len"])),
            held_out=run.held_out,
        )
        self._run, self._config = run, config
        self._target = load_model(config)
        layer = draft_layer(outline.config, intermediate_size=run.drafter.intermediate_size)
        vocabulary = frequent_tokens(documents.learned, run.draft_vocab, vocab_size)
        eagle = eagle3_config(self._target, layer, run.drafter, len(vocabulary))
        weights = untrained_eagle3(
            layer, len(eagle.feature_layers), output_rows(self._target, vocabulary), run.training.seed
        )
        self._drafter = Eagle3Drafter(self._target, layer, run.drafter, vocabulary, weights)
        self._about = {
            "target": about["target"],
            "architecture": (outline.config.architectures or [outline.config.model_type])[0],
            "steps": run.drafter.steps,
        }
        run.out.mkdir(parents=True, exist_ok=True)
        features, self._feature_bytes = self._features(documents)
        self._served = self._evaluation(documents.held_out)
        self._trainer = Trainer(
            run.out,
            self._drafter,
            documents.learned,
            features,
            run.training,
            self._identity(documents, about["content_hash"]),
            evaluate=self._evaluate if documents.held_out else None,
            keep=lambda: self._drafter.save(run.out / BEST, self._about),
        )
        self.opening = Opening(
            target=about["target"],
            num_documents=len(documents.learned),
            answer_tokens=sum(len(document.answer) for document in documents.learned),
            num_held_out=len(documents.held_out),
            unusable=documents.unusable,
            coverage=coverage(documents.learned, vocabulary),
            num_parameters=sum(tensor.numel() for tensor in self._drafter.tensors.values()),
            feature_bytes=self._feature_bytes,
            resumed_step=self._trainer.progress.step,
            num_steps=self._trainer.num_steps,
        )

    @property
    def drafter(self) -> Path:
        """Where the best drafter is kept."""
        return self._run.out / BEST

    def run(self, stop: Callable[[], bool] = lambda: False) -> Iterator[Point]:
        """See `Trainer.run`."""
        return self._trainer.run(stop)

    def _identity(self, documents: Documents, content_hash: str) -> dict[str, Any]:
        """All that decides the weights; how often it is saved and looked at does not."""
        training = replace(self._run.training, save_seconds=0.0, evaluate_steps=0)
        settings = {**asdict(self._run.drafter), **asdict(training), "draft_vocab": self._run.draft_vocab}
        return {"answers": documents.digest, "target": content_hash, **{k: _plain(v) for k, v in settings.items()}}

    def _features(self, documents: Documents) -> tuple[FeatureSource, int]:
        layers, learned = self._drafter.feature_layers, documents.learned
        if self._run.features is None:
            return ComputedFeatures(self._target, learned, layers), 0
        identity = f"{documents.digest} {self._target.content_hash} {layers}"
        budget = self._run.training.pack_tokens
        source = store_features(self._run.features, identity, self._target, learned, layers, budget=budget)
        return source, stored_bytes(learned, self._target, layers)

    # -------------------------------------------------------------- evaluation

    def _evaluation(self, held_out: Seq[Document]) -> Evaluation:
        prompts = list(dict.fromkeys(document.prompt for document in held_out))[: self._run.num_served]
        depth = self._run.drafter.steps
        return Evaluation(self._config, self._target, prompts, max_tokens=self._run.served_tokens, depth=depth)

    def _evaluate(self) -> Evaluated:
        folder = self._run.out / CANDIDATE
        self._drafter.save(folder, self._about)
        served = self._served.run("eagle", folder)
        return Evaluated(served.counts.mean_acceptance_length, self._simulate(served.documents))

    @torch.no_grad()
    def _simulate(self, documents: Seq[Document]) -> Simulation:
        features = ComputedFeatures(self._target, documents, self._drafter.feature_layers)
        found = Simulation()
        for pack in packs([len(document) for document in documents], self._run.training.pack_tokens, 0, 0):
            chosen = [documents[index] for index in pack]
            with torch.autocast("cpu", torch.bfloat16, enabled=self._run.training.autocast):
                found += simulate(chosen, self._drafter.outcome(chosen, features.of(pack)))
        return found


def read_about(folder: Path) -> dict[str, Any]:
    """What `nightdraft distill` noted beside its answers. Raises `UnusableData` where it did not."""
    try:
        about = json.loads((folder / ABOUT).read_text())
        return {key: str(about[key]) for key in ("target", "content_hash", "max_model_len")}
    except FileNotFoundError as error:
        raise UnusableData(f"{folder}: holds no {ABOUT}: make the folder with `nightdraft distill`") from error
    except (ValueError, TypeError, KeyError) as error:
        raise UnusableData(f"{folder}/{ABOUT}: cannot be read: {error!r}") from error


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
