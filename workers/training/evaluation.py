"""How good a drafter is where it will serve: held-out prompts go through the engine itself, drafted as chains."""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path

from workers.engine.api.config import EngineConfig, SpeculationConfig
from workers.engine.api.request import Completion, Request
from workers.engine.api.sampling_params import SamplingParams
from workers.engine.core import EngineCore
from workers.engine.measure.acceptance import AcceptanceCounts
from workers.engine.models.executor import LoadedModel
from workers.training.documents import Document
from workers.training.errors import TrainingError

BATCH = 16


@dataclass(frozen=True, slots=True)
class Served:
    counts: AcceptanceCounts
    documents: tuple[Document, ...]
    """The prompts with the answers that they got. Greedy answers are the target's own, whatever drafted them."""


class Evaluation:
    """Serves held-out prompts greedily with the drafter of a folder, `depth` tokens a step."""

    def __init__(
        self, config: EngineConfig, target: LoadedModel, prompts: Seq[Seq[int]], *, max_tokens: int, depth: int
    ) -> None:
        self._config = config
        self._target = target
        self._prompts = list(prompts)
        self._max_tokens = max_tokens
        self._depth = depth

    def run(self, method: str, folder: Path) -> Served:
        """Raises `TrainingError` when a prompt cannot run; and what loading the drafter raises."""
        speculation = SpeculationConfig(
            method=method, draft=str(folder), policy="fixed", max_draft_tokens=self._depth, tree_width=1
        )
        core = EngineCore(replace(self._config, max_batch=BATCH, speculation=speculation), model=self._target)
        limit = core.max_model_len
        for index, prompt in enumerate(self._prompts):
            params = SamplingParams(max_tokens=min(self._max_tokens, limit - len(prompt)), temperature=0.0)
            refused = core.add(Request(index, tuple(prompt), params))
            if refused is not None:
                raise TrainingError(f"held-out prompt {index} cannot run: {refused.error_message}")
        done: dict[Hashable, Completion] = {}
        while core.has_work:
            done |= {completion.request_id: completion for completion in core.step()}
        completions = [done[index] for index in range(len(self._prompts))]
        return Served(
            AcceptanceCounts.of([completion.stats for completion in completions]),
            tuple(
                Document((*prompt, *completion.token_ids), len(prompt))
                for prompt, completion in zip(self._prompts, completions, strict=True)
            ),
        )
