"""Live progress of one job: a bar where there is a terminal, a line now and then where there is none."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from runner.output.console import error_console, format_value, print_json_line
from runner.output.rates import Rates, RateWindow, format_duration
from runner.output.summary import JobSummary

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

PLAIN_SECONDS = 10.0
POLL_SECONDS = 0.5


class Display(AbstractContextManager["Display"], Protocol):
    """Shows a job's counts. `update` may be called as often as wanted."""

    def update(self, summary: JobSummary, rates: Rates, note: str = "") -> None: ...


class LiveDisplay:
    """A bar with rates, redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}", markup=False),
            console=self._console,
            expand=True,
            transient=True,
        )
        self._progress.start()
        return self

    def update(self, summary: JobSummary, rates: Rates, note: str = "") -> None:
        progress = self._progress
        if progress is None:
            return
        if self._task is None:
            self._task = progress.add_task(summary.name, total=summary.num_results, figures="")
        progress.update(
            self._task,
            description=f"{summary.name} {summary.shown_state}",
            total=summary.num_results,
            completed=summary.num_done,
            figures=figures(summary, rates, note),
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()


class PlainDisplay:
    """One line when the state changes and every `every` seconds, and a last one with the last counts."""

    def __init__(self, console: Console, every: float = PLAIN_SECONDS, clock: Callable[[], float] = time.monotonic):
        self._console = console
        self._every = every
        self._clock = clock
        self._last: tuple[str, str] | None = None
        self._shown_at = 0.0
        self._unshown: tuple[JobSummary, Rates, str] | None = None
        """The newest counts, where they differ from those in the line before."""
        self._shown_done = -1

    def __enter__(self) -> Self:
        return self

    def update(self, summary: JobSummary, rates: Rates, note: str = "") -> None:
        now = self._clock()
        key = (summary.shown_state, note)
        if key == self._last and now - self._shown_at < self._every:
            self._unshown = (summary, rates, note) if summary.num_done != self._shown_done else None
            return
        self._last, self._shown_at = key, now
        self._show(summary, rates, note)

    def _show(self, summary: JobSummary, rates: Rates, note: str) -> None:
        self._unshown, self._shown_done = None, summary.num_done
        line = f"{summary.name} {summary.shown_state} {summary.num_done}/{summary.num_results}"
        self._console.print(
            f"{line} {figures(summary, rates, note)}".rstrip(), markup=False, highlight=False, soft_wrap=True
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._unshown is not None:
            self._show(*self._unshown)


class JsonDisplay:
    """One JSON object per change, for programs."""

    def __init__(self) -> None:
        self._last: dict[str, Any] | None = None

    def __enter__(self) -> Self:
        return self

    def update(self, summary: JobSummary, rates: Rates, note: str = "") -> None:
        counts = summary.to_dict()
        unchanged = {**counts, "seconds": None, "output_tokens_per_second": None}
        if unchanged == self._last:
            return
        self._last = unchanged
        print_json_line(
            {
                **counts,
                "rows_per_second": rates.rows_per_second,
                "tokens_per_second": rates.tokens_per_second,
                "eta_seconds": rates.eta_seconds,
            }
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return


def make_display() -> LiveDisplay | PlainDisplay:
    """The display that suits stderr."""
    console = error_console()
    return LiveDisplay(console) if console.is_terminal else PlainDisplay(console)


def figures(summary: JobSummary, rates: Rates, note: str = "") -> str:
    """What is known of rates, mean acceptance length, failures and ETA in one short text; a note replaces the ETA."""
    parts = []
    if rates.rows_per_second is not None:
        parts.append(f"{rates.rows_per_second:.2f} rows/s")
    if rates.tokens_per_second is not None:
        parts.append(f"{rates.tokens_per_second:.0f} tokens/s")
    if summary.mean_acceptance_length is not None:
        parts.append(f"accepts {format_value(summary.mean_acceptance_length)}")
    if summary.counts.num_errors:
        parts.append(f"{summary.counts.num_errors} failed")
    if note:
        parts.append(note)
    elif rates.eta_seconds is not None and not summary.state.terminal:
        parts.append(f"ETA {format_duration(rates.eta_seconds)}")
    return " · ".join(parts)


class Follower:
    """Reads a job's counts now and then and hands them to a display. A slow store is read less often."""

    def __init__(self, read: Callable[[], JobSummary], display: Display, poll: float = POLL_SECONDS) -> None:
        self._read = read
        self._display = display
        self._poll = poll
        self._window = RateWindow()

    def restart(self) -> None:
        """Rates count from now."""
        self._window.restart()

    def refresh(self, note: str = "", tokens: int | None = None) -> tuple[JobSummary, float]:
        """Read, show, and say how many seconds to wait before the next reading (reading takes at most a tenth).

        `tokens`: a count of those emitted so far; None: those of finished rows, as long as nobody counts the others.
        """
        started = time.monotonic()
        summary = self._read()
        now = time.monotonic()
        self._window.add(now, summary.num_done, summary.counts.num_output_tokens if tokens is None else tokens)
        rates = self._window.rates(summary.num_results - summary.num_done)
        self._display.update(summary, rates, note)
        return summary, max(self._poll, 9 * (now - started))
