"""The command group: every command by name, and the one place where an error becomes a line and an exit code."""

from __future__ import annotations

import errno
import sys
import traceback
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from runner.cli import drafts, jobs, run, services, store, training
from runner.cli.flags import SpecCommand
from runner.errors import ExitCode, exit_code
from runner.output.console import error_console, visible
from storage.redaction import redacted


class CommandGroup(TyperGroup):
    """Turns the errors that the packages raise on purpose into one line on stderr and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(ExitCode.INTERRUPTED) from None
        except Exception as error:
            code = exit_code(error)
            if code is None:
                raise
            text = _escape(visible(redacted(str(error))))
            error_console().print(f"[bold red]error:[/] {text}", soft_wrap=True, highlight=False)
            raise typer.Exit(code) from None


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Offline batch generation with speculative decoding: Parquet in, every row answered, statistics in SQL.",
    epilog="Exit codes: 0 ok, 1 failed, 2 bad usage or configuration, 3 completed with failed rows, 130 interrupted.",
)


def _version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        typer.echo(f"nightdraft {version('nightdraft')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


app.command("run", cls=SpecCommand)(run.run)
app.command("submit", cls=SpecCommand)(jobs.submit)
app.command("status")(jobs.status)
app.command("watch")(jobs.watch)
app.command("cancel")(jobs.cancel)
app.command("resume")(jobs.resume)
app.command("retry")(jobs.retry)
app.command("errors")(jobs.errors)
app.command("export")(jobs.export)
app.command("sql")(store.sql)
app.command("calibrate", cls=SpecCommand)(drafts.calibrate)
app.command("check-draft", cls=SpecCommand)(drafts.check_draft)
app.command("distill", cls=SpecCommand)(training.distill)
app.add_typer(training.train, name="train")
app.command("worker")(services.worker)
app.command("scheduler")(services.scheduler)
app.command("doctor")(services.doctor)
app.add_typer(store.schema, name="db")


def main() -> None:
    """Entry point of the console script."""
    try:
        app(prog_name="nightdraft")
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            print(f"error: no space is left for {error.filename or 'what is written'}: free some", file=sys.stderr)
            sys.exit(ExitCode.FAILED)
        # An error that nobody expected: its traceback is for the report, and goes where others can read it.
        print(redacted(traceback.format_exc()), end="", file=sys.stderr)
        sys.exit(ExitCode.FAILED)
