"""Draft lengths: how many levels each sequence drafts in the coming step."""

from __future__ import annotations

from collections.abc import Callable

from workers.engine.api.config import SpeculationConfig
from workers.engine.controller.auto import AutoController
from workers.engine.controller.controller import Controller, StepCost
from workers.engine.controller.fixed import FixedController
from workers.engine.controller.threshold import ThresholdController

__all__ = ["AutoController", "Controller", "FixedController", "StepCost", "ThresholdController", "make_controller"]


def make_controller(config: SpeculationConfig, nodes: Callable[[int], int] = lambda length: length) -> Controller:
    """The policy that `config.policy` names. nodes(length): rows that a draft of so many levels adds to a pass."""
    if config.policy == "fixed":
        return FixedController(config)
    return ThresholdController(config) if config.policy == "threshold" else AutoController(config, nodes)
