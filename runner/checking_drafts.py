"""`nightdraft check-draft`: what makes a good draft, measured on the user's own prompts, and what fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from runner.errors import ExitCode, UsageError
from runner.prompt_rows import prepared_prompts
from runner.spec import JobSpec
from runner.tables import format_bytes, note, print_fields, print_json, print_rows

if TYPE_CHECKING:
    from workers.engine.check_draft import DraftReport

DEFAULT_BATCHES = (1, 4, 16)


def check_draft(spec: JobSpec, *, batches: Sequence[int] | None, as_json: bool) -> ExitCode:
    """Measure and show. Rules of thumb that fail are a finding; tokens that differ under rule exact are a failure.

    Raises `UsageError` without a method, and what the engine raises for models and options.
    """
    from workers.engine.check_draft import check_draft as measure

    config = spec.engine_config()
    if config.speculation.method == "none":
        raise UsageError("no way of drafting is named: add --draft MODEL or --method METHOD")
    prompts = prepared_prompts(spec)
    report = measure(
        config, prompts.token_ids, tuple(batches or DEFAULT_BATCHES), prompts.params.max_tokens, params=prompts.params
    )
    if as_json:
        print_json(_as_json(report))
    else:
        _show(report)
    if report.identical or config.speculation.verify != "exact":
        return ExitCode.OK
    note("the tokens differ from those of plain decoding, which must not be: please report it, with the two models")
    return ExitCode.FAILED


def _as_json(report: DraftReport) -> dict[str, Any]:
    failed = [rule.name for rule in report.failed_rules]
    return {**asdict(report), "acceptance": report.acceptance, "failed_rules": failed}


def _show(report: DraftReport) -> None:
    print_fields(_fields(report), title=f"{report.method} on {report.target}")
    acceptance = zip(report.reached, report.accepted, report.acceptance, strict=True)
    positions = [(position, *counts) for position, counts in enumerate(acceptance, start=1)]
    print_rows(
        ("position", "reached", "accepted", "acceptance"), positions, title="acceptance by position in the draft"
    )
    print_rows(
        (
            "batch",
            "plain step, ms",
            "draft pass, ms",
            "verify step, ms",
            "speed ratio",
            "predicted speedup",
            "measured",
        ),
        [
            (
                batch.batch,
                1e3 * batch.plain_step,
                1e3 * batch.draft_pass,
                1e3 * batch.verify_step,
                batch.speed_ratio,
                batch.predicted_speedup,
                batch.measured_speedup,
            )
            for batch in report.batches
        ],
        title="by batch size",
    )
    print_rows(
        ("rule of thumb", "wanted", "measured", "holds"),
        [(rule.name, rule.wanted, rule.measured, rule.holds) for rule in report.rules],
        title=_verdict(report),
    )


def _fields(report: DraftReport) -> dict[str, Any]:
    weights, kv = report.draft_weight_bytes, report.draft_kv_bytes_per_token
    return {
        "draft": report.draft,
        "same tokens as plain decoding": report.identical,
        "mean acceptance length": report.mean_acceptance_length,
        "vocabulary": f"{report.vocabulary}, {report.vocabulary_overlap:.0%} in common",
        "weights": f"{format_bytes(weights)} beside the target's {format_bytes(report.target_weight_bytes)}",
        "size ratio": weights / report.target_weight_bytes if report.target_weight_bytes else None,
        "KV per token": f"{format_bytes(kv)} beside the target's {format_bytes(report.target_kv_bytes_per_token)}",
    }


def _verdict(report: DraftReport) -> str:
    failed = ", ".join(rule.name for rule in report.failed_rules)
    return f"rules of thumb that fail: {failed}" if failed else "every rule of thumb holds"
