"""What `check_draft` found, and the rules of thumb for drafts."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from workers.engine.measure.acceptance import AcceptanceCounts, rate_interval

FASTER, ACCEPTED, SMALLER = 5.0, 0.7, 0.2
WORTH_IT = 1.03
"""A speedup that is recommended at the least: as much as policy auto asks for."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule of thumb for drafts, and how it went."""

    name: str
    wanted: str
    measured: float | None
    """None when nothing happened that it could be measured by."""
    holds: bool | None
    """None: undecided, what was measured being too little to tell on which side of the limit it lies."""
    interval: tuple[float, float] | None = None
    """95 % interval, of what is an estimate from counts."""


@dataclass(frozen=True, slots=True)
class BatchReport:
    """One batch size. Times are seconds per step, while the whole batch decodes; prompts are no part of them."""

    batch: int
    requests: int
    """Sent through either way. More than there are prompts where these had to be repeated to fill the batch."""
    tokens_per_step: float
    """Of a request, steps without a draft included. As counted, but for `suffix`, which learns from the requests that
    are done: they are the fewer, the larger the batch."""
    plain_steps: int
    """Steps behind `plain_step`."""
    drafting_steps: int
    """Steps behind the other times."""
    plain_step: float
    """Mean."""
    draft_pass: float
    """One level of a draft: the median over steps."""
    verify_step: float
    """Mean of what a step takes beside its drafting, if any."""
    speed_ratio: float
    """plain_step / draft_pass: how many times faster than the target the drafter is."""
    predicted_speedup: float
    """tokens_per_step, by the time of a step in units of a plain step; steps without a draft are in both."""
    measured_speedup: float
    """Tokens per second by those of plain decoding, prompts and thinning batches included."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """How long drafts should be at one batch size."""

    batch: int
    length: int
    """Tokens along one path; 0: plain decoding is as fast or faster."""
    speedup: float
    """Expected of that length, by the measured one of full length; 1 where nothing is to be drafted."""
    is_longest: bool
    """It is the longest that was measured: a longer one may be better still."""


def recommend(batch: BatchReport, survival: Seq[float], depth: int) -> Recommendation:
    """The length with the best expected tokens per second, if it beats plain decoding by `WORTH_IT`.

    A step with drafts of length k emits 1 + the first k of `survival` tokens. Drafting takes as long for each level,
    and verification grows evenly from a plain step to that of `depth` levels. What the clock said of full drafts
    (prompts and thin batches included), beside what this predicts of them, corrects the others.
    """
    whole = batch.tokens_per_step * batch.plain_step / batch.predicted_speedup
    level = max(0.0, whole - batch.verify_step) / depth
    survival = [*survival, *[0.0] * depth][:depth]

    def speedup(length: int) -> float:
        verify = batch.plain_step + (batch.verify_step - batch.plain_step) * length / depth
        return (1 + sum(survival[:length])) * batch.plain_step / (length * level + verify)

    corrected = min(1.0, batch.measured_speedup / max(speedup(depth), 1e-9))
    length, best = max(((n, corrected * speedup(n)) for n in range(1, depth + 1)), key=lambda found: found[1])
    if best < WORTH_IT:
        return Recommendation(batch.batch, 0, 1.0, is_longest=False)
    return Recommendation(batch.batch, length, best, is_longest=length == depth)


@dataclass(frozen=True, slots=True)
class DraftReport:
    """What `check_draft` found."""

    method: str
    target: str
    draft: str | None
    identical: bool
    """Whether both ways gave the same tokens, as they must under rule exact."""
    counts: AcceptanceCounts
    """Over all prompts, each once, whatever batch sizes are timed."""
    vocabulary: str
    """same, mapped or text."""
    vocabulary_overlap: float
    target_weight_bytes: int
    draft_weight_bytes: int
    """Of weights that the draft keeps beside the target's."""
    target_kv_bytes_per_token: int
    draft_kv_bytes_per_token: int
    """Of a KV cache of the draft's own."""
    draft_hidden_bytes_per_token: int
    """Of the target's hidden states that the draft reads; they are kept in the slots of the target's KV cache."""
    batches: tuple[BatchReport, ...]
    rules: tuple[Rule, ...]
    depth: int
    """Length of the drafts that were measured."""

    @property
    def recommendations(self) -> tuple[Recommendation, ...]:
        """One for each batch size."""
        return tuple(recommend(batch, self.counts.survival, self.depth) for batch in self.batches)

    @property
    def failed_rules(self) -> tuple[Rule, ...]:
        return tuple(rule for rule in self.rules if rule.holds is False)

    @property
    def undecided_rules(self) -> tuple[Rule, ...]:
        return tuple(rule for rule in self.rules if rule.holds is None)


def judge(counts: AcceptanceCounts, speed_ratio: float, size_ratio: float, coverage: float) -> tuple[Rule, ...]:
    """Rules of thumb: `size_ratio` is of weights, `coverage` the share of the target's tokens that the draft has."""
    low, high = counts.intervals[0] if counts.tested else rate_interval(())
    return (
        Rule("speed", f"a draft pass at least {FASTER:g} times as fast", speed_ratio, speed_ratio >= FASTER),
        Rule(
            "acceptance",
            f"at least {ACCEPTED:.0%} of first tokens accepted",
            counts.acceptance[0] if counts.tested else None,
            None if low < ACCEPTED <= high else low >= ACCEPTED,
            (low, high),
        ),
        Rule("size", f"at most {SMALLER:.0%} of the target's weights", size_ratio, size_ratio <= SMALLER),
        Rule("vocabulary", "all of the target's tokens", coverage, coverage >= 1.0),
    )
