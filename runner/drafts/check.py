"""`nightdraft check-draft`: what makes a good draft, measured on the user's own prompts, and what fails."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from runner.drafts.prompts import prepared_prompts
from runner.errors import ExitCode, UsageError
from runner.output.console import counted, format_bytes, format_value, note
from runner.output.draft_advice import NEAR_ZERO, likely_causes
from runner.output.output import Fields, Output, Table
from storage.spec import JobSpec
from workers.rows.settings import engine_config

if TYPE_CHECKING:
    from workers.engine.measure.check_draft import AcceptanceCounts, DraftReport

DEFAULT_BATCHES = (1, 4, 16)


def check_draft(spec: JobSpec, output: Output, *, batches: Sequence[int] | None) -> ExitCode:
    """Measure and show. Rules of thumb that fail are a finding; tokens that differ under rule exact are a failure.

    Raises `UsageError` without a method, and what the engine raises for models and options.
    """
    from workers.engine.measure.check_draft import check_draft as measure

    config = engine_config(spec)
    if config.speculation.method == "none":
        raise UsageError("no way of drafting is named: add --draft MODEL or --method METHOD")
    prompts = prepared_prompts(spec)
    report = measure(
        config, prompts.token_ids, tuple(batches or DEFAULT_BATCHES), prompts.params.max_tokens, params=prompts.params
    )
    for batch in report.batches:
        if batch.batch > report.counts.prompts:
            note(
                f"batch {batch.batch} holds more sequences than there are prompts ({report.counts.prompts}): they are "
                "repeated to time it, and counted once; give more (rows, --limit) to time it as a job would run"
            )
    output.show(_values(report), *_parts(report), _recommended(report))
    if report.counts.tested and report.counts.intervals[0][1] < NEAR_ZERO:
        causes = likely_causes(config.speculation, prompts.params.temperature)
        note(f"warning: next to no draft begins with a token that is accepted. {causes}")
    if report.identical or config.speculation.verify != "exact":
        return ExitCode.OK
    note("the tokens differ from those of plain decoding, which must not be: please report it, with the two models")
    return ExitCode.FAILED


def _values(report: DraftReport) -> dict[str, Any]:
    """The report flat, with what is derived from its counts."""
    found, counts = asdict(report), report.counts
    return {
        **found.pop("counts"),
        **found,
        "tested": counts.tested,
        "acceptance": counts.acceptance,
        "survival": counts.survival,
        "mean_acceptance_length": counts.mean_acceptance_length,
        "failed_rules": [rule.name for rule in report.failed_rules],
        "recommendations": [asdict(one) for one in report.recommendations],
        "undecided_rules": [rule.name for rule in report.undecided_rules],
    }


def _parts(report: DraftReport) -> Iterator[Fields | Table]:
    yield Fields(_fields(report), title=f"{report.method} on {report.target}")
    yield Table(
        ("position", "reached", "accepted", "acceptance", "95 % interval", "of all steps"),
        _positions(report.counts),
        title="acceptance by position in the draft",
    )
    yield Table(
        (
            "batch",
            "plain steps",
            "draft steps",
            "plain step, ms",
            "draft pass, ms",
            "verify step, ms",
            "speed ratio",
            "tokens per step",
            "predicted speedup",
            "measured",
        ),
        [
            (
                batch.batch,
                batch.plain_steps,
                batch.drafting_steps,
                1e3 * batch.plain_step,
                1e3 * batch.draft_pass,
                1e3 * batch.verify_step,
                batch.speed_ratio,
                batch.tokens_per_step,
                batch.predicted_speedup,
                batch.measured_speedup,
            )
            for batch in report.batches
        ],
        title="by batch size, timed while the whole batch decodes",
    )
    yield Table(
        ("rule of thumb", "wanted", "measured", "95 % interval", "holds"),
        [
            (
                rule.name,
                rule.wanted,
                rule.measured,
                _interval(rule.interval),
                "undecided" if rule.holds is None else rule.holds,
            )
            for rule in report.rules
        ],
        title=_verdict(report),
    )


def _recommended(report: DraftReport) -> str:
    """Which length to take, batch by batch, in one sentence."""
    parts = []
    for one in report.recommendations:
        if not one.length:
            parts.append(f"batch {one.batch}: none, plain decoding is as fast or faster")
            continue
        longer = f", or more: measure with --max-draft-tokens {2 * one.length}" if one.is_longest else ""
        parts.append(
            f"batch {one.batch}: --max-draft-tokens {one.length} (about {one.speedup:.2f} times as fast{longer})"
        )
    return "recommended draft length: " + "; ".join(parts)


def _positions(counts: AcceptanceCounts) -> list[tuple[Any, ...]]:
    columns = zip(
        counts.reached,
        counts.accepted,
        counts.acceptance,
        map(_interval, counts.intervals),
        counts.survival,
        strict=True,
    )
    return [(position, *column) for position, column in enumerate(columns, start=1)]


def _interval(ends: tuple[float, float] | None) -> str:
    return "" if ends is None else f"{ends[0]:.3f} to {ends[1]:.3f}"


def _fields(report: DraftReport) -> dict[str, Any]:
    counts = report.counts
    weights, kv, hidden = (
        report.draft_weight_bytes,
        report.draft_kv_bytes_per_token,
        report.draft_hidden_bytes_per_token,
    )
    return {
        "draft": report.draft,
        "measured on": f"{counted(counts.prompts, 'prompt')}, {counted(counts.output_tokens, 'output token')}, "
        f"{counted(counts.steps, 'step')}, of which {format_value(counts.tested)} tested a draft",
        "same tokens as plain decoding": report.identical,
        "mean acceptance length": counts.mean_acceptance_length,
        "vocabulary": f"{report.vocabulary}, {report.vocabulary_overlap:.0%} in common",
        "weights": f"{format_bytes(weights)} beside the target's {format_bytes(report.target_weight_bytes)}",
        "size ratio": weights / report.target_weight_bytes if report.target_weight_bytes else None,
        "KV per token": f"{format_bytes(kv)} beside the target's {format_bytes(report.target_kv_bytes_per_token)}",
        "hidden states per token": f"{format_bytes(hidden)} more in the target's KV cache, for the draft to read",
    }


def _verdict(report: DraftReport) -> str:
    failed = ", ".join(rule.name for rule in report.failed_rules)
    undecided = ", ".join(rule.name for rule in report.undecided_rules)
    parts = [
        f"rules of thumb that fail: {failed}" if failed else "",
        f"undecided, give more rows or tokens: {undecided}" if undecided else "",
    ]
    return "; ".join(filter(None, parts)) or "every rule of thumb holds"
