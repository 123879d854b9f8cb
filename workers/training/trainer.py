"""The training loop: AdamW with warm-up and cosine over packs of documents; saved, stopped and resumed at any step.

Nothing but (seed, epoch, pack) decides what a step learns from, so a run that was stopped and resumed ends with the
weights of one that never was.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from workers.training.checkpoints import Progress, load_state, save_state
from workers.training.documents import Document
from workers.training.drafter import Drafter, Outcome
from workers.training.errors import Diverged
from workers.training.features import FeatureSource
from workers.training.packing import Pack, packs
from workers.training.simulation import Simulation


@dataclass(frozen=True, slots=True)
class TrainOptions:
    epochs: int = 2
    pack_tokens: int = 4096
    """Tokens of one pack, prompts included."""
    accumulate: int = 1
    """Packs of one step of the optimiser."""
    lr: float = 1e-3
    warmup: float = 0.05
    """Share of all steps."""
    weight_decay: float = 0.01
    clip: float = 1.0
    """Norm of the gradient at most."""
    seed: int = 0
    save_seconds: float = 120.0
    evaluate_steps: int = 200
    """Steps between evaluations; one comes at the end in any case."""
    autocast: bool = True
    """Products in bfloat16, weights in float32."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """How good the drafter is on held-out prompts."""

    served: float
    """Tokens per step that the engine made of it."""
    simulated: Simulation
    """What a replay of the same answers says of it."""


@dataclass(frozen=True, slots=True)
class Point:
    """What a training shows of itself at a step."""

    progress: Progress
    num_steps: int
    """Of the whole training."""
    loss: float
    """Mean over the rows of the packs since the last point."""
    lr: float
    seconds: float
    """Since this run of it began."""
    answer_tokens: int
    """Learned from in this run of it."""
    evaluated: Evaluated | None = None


class Trainer:
    def __init__(
        self,
        folder: Path,
        drafter: Drafter,
        documents: Seq[Document],
        features: FeatureSource,
        options: TrainOptions,
        identity: Mapping[str, Any],
        evaluate: Callable[[], Evaluated] | None = None,
        keep: Callable[[], None] = lambda: None,
    ) -> None:
        """`identity` names all that decides the weights. `evaluate` says how good the drafter is now, and `keep` is
        called when it was never better (or, without evaluations, at the end)."""
        self._folder = folder
        self._drafter = drafter
        self._documents = documents
        self._features = features
        self._options = options
        self._identity = dict(identity)
        self._evaluate, self._keep = evaluate, keep
        self._optimiser = torch.optim.AdamW(
            list(drafter.tensors.values()), lr=options.lr, betas=(0.9, 0.95), weight_decay=options.weight_decay
        )
        self._lengths = [len(document) for document in documents]
        self.progress = Progress()
        self._resume()

    # ------------------------------------------------------------- the loop

    def run(self, stop: Callable[[], bool] = lambda: False) -> Iterator[Point]:
        """Train to the end, or until `stop` says so; saves at intervals and at the end of either kind.

        Raises `Diverged` when the loss is no number; what was saved before is kept.
        """
        started = saved = time.monotonic()
        tokens_before = self.progress.answer_tokens
        num_steps = self.num_steps
        for step in self._steps():
            if stop():
                break
            loss, rows = self._learn(step, num_steps)
            now = time.monotonic()
            yield Point(
                self.progress, num_steps, loss / max(1, rows), self._lr(self.progress.step - 1, num_steps),
                now - started, self.progress.answer_tokens - tokens_before, self._judge(num_steps),
            )  # fmt: skip
            if now - saved > self._options.save_seconds:
                self.save()
                saved = time.monotonic()
        self.save()

    @property
    def num_steps(self) -> int:
        return sum(-(-len(self._packs(epoch)) // self._options.accumulate) for epoch in range(self._options.epochs))

    def _packs(self, epoch: int) -> list[Pack]:
        return packs(self._lengths, self._options.pack_tokens, self._options.seed, epoch)

    def _steps(self) -> Iterator[list[Pack]]:
        """The packs of each step that is still to be taken."""
        while self.progress.epoch < self._options.epochs:
            todo = self._packs(self.progress.epoch)
            while self.progress.pack < len(todo):
                yield todo[self.progress.pack :][: self._options.accumulate]
            self.progress = replace(self.progress, epoch=self.progress.epoch + 1, pack=0)

    def _learn(self, step: Seq[Pack], num_steps: int) -> tuple[float, int]:
        """One step of the optimiser: the sum of the loss, and its rows."""
        chosen = [[self._documents[index] for index in pack] for pack in step]
        answer_tokens = sum(len(document.answer) for documents in chosen for document in documents)
        for group in self._optimiser.param_groups:
            group["lr"] = self._lr(self.progress.step, num_steps)
        self._optimiser.zero_grad(set_to_none=True)
        total, rows = 0.0, 0
        for documents, pack in zip(chosen, step, strict=True):
            outcome = self._outcome(documents, pack)
            # By the tokens of all packs of the step: a mean of means would weigh short answers more.
            (outcome.loss / answer_tokens).backward()  # type: ignore[no-untyped-call]
            total, rows = total + float(outcome.loss.detach()), rows + outcome.rows
        norm = torch.nn.utils.clip_grad_norm_(self._drafter.tensors.values(), self._options.clip)
        if not math.isfinite(total) or not bool(torch.isfinite(norm)):
            raise Diverged(
                f"the loss is {total} in step {self.progress.step + 1}: lower the learning rate; what was saved in step"
                f" {self._saved_step} is kept"
            )
        self._optimiser.step()
        self.progress = replace(
            self.progress,
            pack=self.progress.pack + len(step),
            step=self.progress.step + 1,
            answer_tokens=self.progress.answer_tokens + answer_tokens,
        )
        return total, rows

    def _outcome(self, documents: Seq[Document], pack: Pack) -> Outcome:
        features = self._features.of(pack)
        with torch.autocast("cpu", torch.bfloat16, enabled=self._options.autocast):
            return self._drafter.outcome(documents, features)

    def _lr(self, step: int, num_steps: int) -> float:
        """Warm-up, then a half cosine down to a twentieth."""
        warmup = max(1, round(self._options.warmup * num_steps))
        if step < warmup:
            return self._options.lr * (step + 1) / warmup
        done = (step - warmup) / max(1, num_steps - warmup)
        return self._options.lr * (0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2)

    def _judge(self, num_steps: int) -> Evaluated | None:
        """Evaluate where it is due, and keep the drafter if it was never better."""
        last = self.progress.step == num_steps
        if not last and self.progress.step % self._options.evaluate_steps:
            return None
        if self._evaluate is None:
            if last:
                self._keep()
            return None
        evaluated = self._evaluate()
        if evaluated.served > self.progress.best:
            self._keep()
            self.progress = replace(self.progress, best=evaluated.served)
        return evaluated

    # ------------------------------------------------------------- checkpoints

    def save(self) -> None:
        moments = {name: dict(self._optimiser.state[tensor]) for name, tensor in self._drafter.tensors.items()}
        save_state(self._folder, self._identity, self.progress, self._drafter.tensors, moments)
        self._saved_step = self.progress.step

    def _resume(self) -> None:
        self._saved_step = 0
        state = load_state(self._folder, self._identity)
        if state is None:
            return
        self.progress, self._saved_step = state.progress, state.progress.step
        with torch.no_grad():
            for name, tensor in self._drafter.tensors.items():
                tensor.copy_(state.tensors[name])
        for name, tensor in self._drafter.tensors.items():
            if state.moments[name]:
                self._optimiser.state[tensor] = dict(state.moments[name])
