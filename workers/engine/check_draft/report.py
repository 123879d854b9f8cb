"""What `check_draft` found, and the rules of thumb for drafts."""

from __future__ import annotations

from dataclasses import dataclass

from workers.engine.check_draft.acceptance import AcceptanceCounts, rate_interval

FASTER, ACCEPTED, SMALLER = 5.0, 0.7, 0.2


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
