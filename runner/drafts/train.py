"""`nightdraft train eagle3`: run a training, show it live, say what came of it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from runner.errors import ExitCode
from runner.output.console import note
from runner.output.output import Fields, Output, Table

if TYPE_CHECKING:
    from workers.training.runs import Eagle3Run, Opening
    from workers.training.trainer import Point


def train_eagle3(run: Eagle3Run, output: Output) -> ExitCode:
    """Train to the end, or until Ctrl-C; the same command goes on. Raises what `Eagle3Training` does."""
    from workers.training.runs import Eagle3Training

    training = Eagle3Training(run)
    _introduce(training.opening)
    points: list[Point] = []
    with _stoppable() as stop:
        last = None
        for point in training.run(stop):
            last = point
            if point.evaluated is not None:
                points.append(point)
            note(_line(point))
    if last is None and training.opening.resumed_step == training.opening.num_steps:
        note("this training has ended already: nothing is left to learn")
    finished = last is None or last.progress.step == last.num_steps
    _show(output, training.opening, points, str(training.drafter), finished=finished)
    if not finished:
        note("interrupted: the state is saved; the same command goes on from here")
        return ExitCode.INTERRUPTED
    return ExitCode.OK


def _introduce(opening: Opening) -> None:
    note(
        f"{opening.num_documents} answers of {opening.target}, {opening.answer_tokens:,} tokens;"
        f" {opening.num_held_out} held out; {opening.num_parameters / 1e6:.1f} M weights;"
        f" the draft's vocabulary holds {opening.coverage:.1%} of the answers' tokens"
    )
    for reason, count in opening.unusable.items():
        note(f"{count} answers are left out: {reason}")
    if opening.feature_bytes:
        note(f"features of the target: {opening.feature_bytes:,} bytes on disk")
    if opening.resumed_step:
        note(f"goes on from step {opening.resumed_step} of {opening.num_steps}")


def _line(point: Point) -> str:
    speed = point.answer_tokens / max(point.seconds, 1e-9)
    done = point.progress.step
    left = point.seconds / max(1, point.answer_tokens) * point.progress.answer_tokens * (point.num_steps / done - 1)
    text = f"step {done}/{point.num_steps} loss {point.loss:.3f} · {speed:.0f} tokens/s · {left / 60:.0f} min left"
    if point.evaluated is None:
        return text
    rates = " ".join(f"{rate:.2f}" for rate in point.evaluated.simulated.acceptance)
    return (
        f"{text} · held out: {point.evaluated.served:.3f} tokens per step served,"
        f" {point.evaluated.simulated.tokens_per_step:.3f} simulated, acceptance by position {rates}"
    )


def _show(output: Output, opening: Opening, points: list[Point], drafter: str, *, finished: bool) -> None:
    rows = [_row(point) for point in points]
    values: dict[str, Any] = {**asdict(opening), "drafter": drafter, "finished": finished, "evaluations": rows}
    columns = ("step", "answer_tokens", "served", "simulated", "acceptance")
    output.show(
        values,
        Fields({"drafter": drafter, "finished": finished}, title=f"eagle3 for {opening.target}"),
        Table(
            columns,
            [[row[column] for column in columns] for row in rows],
            title="tokens per step, held out",
            empty="nothing was held out",
        ),
    )


def _row(point: Point) -> dict[str, Any]:
    assert point.evaluated is not None
    simulated = point.evaluated.simulated
    return {
        "step": point.progress.step,
        "answer_tokens": point.progress.answer_tokens,
        "served": point.evaluated.served,
        "simulated": simulated.tokens_per_step,
        "acceptance": list(simulated.acceptance),
    }


@contextmanager
def _stoppable() -> Iterator[Any]:
    """Says whether Ctrl-C was pressed: the first one lets the step end, a second one is what it always is."""
    asked = False

    def ask(signum: int, frame: Any) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGINT, before)
        note("stopping after this step")

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)
