"""What is said about drafts that are of no use, and why they may be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workers.engine.api.config import MAX_TREE_NODES, SpeculationConfig
from workers.rows.settings import engine_config, sampling_params

if TYPE_CHECKING:
    from storage.records import Counts, Job

NEAR_ZERO = 0.05
"""Accepted tokens for each whole draft: fewer, and next to no draft began with a token that was right."""
FEWEST_DRAFTS = 20
"""Whole drafts' worth of tokens that tell anything."""

_CAUSES = {
    "draft_model": (
        "the draft's tokenizer is not really the target's (check-draft shows the vocabularies)",
        "it expects another chat template, or is a base model beside an instructed target",
        "it is a model of another family, language or subject",
    ),
    "eagle": (
        "the draft layer was trained for another target, or for another version of it",
        "it was trained on another chat template, or on text of another kind",
    ),
    "medusa": (
        "the heads were trained for another target, or for another version of it",
        "they were trained on another chat template, or on text of another kind",
    ),
    "self": ("too much is skipped: run nightdraft calibrate on some of these prompts",),
    "ngram": ("the answers repeat nothing of their prompts or of themselves: ngram_min may be too short",),
    "suffix": ("the answers have nothing in common with each other or their prompts",),
}


def draft_warning(job: Job, counts: Counts) -> str | None:
    """One sentence when next to none of a job's drafted tokens were accepted; None where they were, or were too few."""
    config = engine_config(job.spec).speculation
    drafted, accepted = counts.num_draft_tokens, counts.num_accepted_draft_tokens
    whole = drafted / _largest_draft(config)
    if whole < FEWEST_DRAFTS or accepted >= NEAR_ZERO * whole:
        return None
    return (
        f"of {drafted:,} drafted tokens {accepted:,} were accepted: drafting only cost time. "
        f"{likely_causes(config, sampling_params(job.spec).temperature)}"
    )


def likely_causes(config: SpeculationConfig, temperature: float) -> str:
    """What the methods of a job suggest, in one sentence."""
    causes = [cause for method in config.methods for cause in _CAUSES.get(method, ())]
    if temperature > 1:
        causes.append(f"the temperature of {temperature:g} leaves little to foresee")
    return f"Likely causes: {'; '.join(causes)}"


def _largest_draft(config: SpeculationConfig) -> int:
    """Tokens of a whole draft, at most."""
    if "medusa" in config.methods and not config.has_tree:
        return MAX_TREE_NODES  # a calibrated tree may have as many
    return max(1, config.tree_shape.max_nodes(config.depth))
