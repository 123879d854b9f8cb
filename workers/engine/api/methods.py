"""The registry of drafting methods. It names classes as text, so that it can be read without loading torch."""

from __future__ import annotations

REGISTRY = {
    "none": "workers.engine.speculators.none:NoSpeculator",
    "ngram": "workers.engine.speculators.lookup.ngram:NgramSpeculator",
    "suffix": "workers.engine.speculators.lookup.suffix:SuffixSpeculator",
    "draft_model": "workers.engine.speculators.draft_model.speculator:DraftModelSpeculator",
    "medusa": "workers.engine.speculators.medusa.speculator:MedusaSpeculator",
    "eagle": "workers.engine.speculators.eagle.speculator:EagleSpeculator",
    "self": "workers.engine.speculators.self.speculator:SelfSpeculator",
}
"""Method -> "module:class" of a `Speculator` with a class method `create(context)`. See docs/adding-a-method.md."""
