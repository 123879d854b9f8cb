"""Commands that run a service, and `doctor`, which says what stands in its way."""

from __future__ import annotations

from typing import Annotated

import typer

from runner.cli.options import DEFAULT_BROKER, DEFAULT_STORE, Broker, Json, OptionalBroker, Store
from runner.output.output import Output
from workers import CHUNKS_IN_FLIGHT


def worker(
    concurrency: Annotated[
        int, typer.Option("--concurrency", min=1, help="Chunks in flight; they share one engine.")
    ] = CHUNKS_IN_FLIGHT,
    store: Store = DEFAULT_STORE,
    broker: Broker = DEFAULT_BROKER,
    allow_remote_code: Annotated[
        bool,
        typer.Option(
            "--allow-remote-code/--no-remote-code",
            help="Whether jobs that ask for it (engine.trust_remote_code) may run code that comes with their model.",
        ),
    ] = False,
) -> None:
    """Take chunks from the broker and answer their rows. SIGTERM: records what is finished and exits."""
    from runner.services.serve import run_worker

    run_worker(store, broker, concurrency, allow_remote_code=allow_remote_code)


def scheduler(store: Store = DEFAULT_STORE, broker: Broker = DEFAULT_BROKER) -> None:
    """Dispatch chunks of submitted jobs, reap lost ones, finish jobs. Several may run."""
    from runner.services.serve import run_scheduler

    raise typer.Exit(run_scheduler(store, broker))


def doctor(store: Store = DEFAULT_STORE, broker: OptionalBroker = None, as_json: Json = False) -> None:
    """Check this machine, the store and the broker. Exit code 1 when something is broken."""
    from runner.output.jobs import show_checks
    from runner.services.doctor import run_checks

    raise typer.Exit(show_checks(Output(as_json), run_checks(store, broker)))
