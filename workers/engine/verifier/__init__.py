"""Verification: which drafted tokens stand, and what is emitted after them."""

from __future__ import annotations

from workers.engine.api.config import SpeculationConfig
from workers.engine.verifier.block import BlockVerifier
from workers.engine.verifier.coupled import CoupledVerifier
from workers.engine.verifier.descent import Verdict, Verifier
from workers.engine.verifier.rejection import RejectionVerifier
from workers.engine.verifier.typical import TypicalVerifier

__all__ = [
    "BlockVerifier",
    "CoupledVerifier",
    "RejectionVerifier",
    "TypicalVerifier",
    "Verdict",
    "Verifier",
    "make_verifier",
]


def make_verifier(config: SpeculationConfig) -> Verifier:
    """The rule that `config.verify` names (docs/verification.md)."""
    if config.verify == "typical":
        return TypicalVerifier(config.typical_epsilon, config.typical_delta)
    rules: dict[str, type[CoupledVerifier | RejectionVerifier | BlockVerifier]] = {
        "exact": CoupledVerifier,
        "rejection": RejectionVerifier,
        "block": BlockVerifier,
    }
    return rules[config.verify]()
