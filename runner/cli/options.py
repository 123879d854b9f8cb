"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

DEFAULT_STORE = "sqlite:///nightdraft.db"

Store = Annotated[
    str,
    typer.Option(
        "--store",
        envvar="NIGHTDRAFT_STORE",
        metavar="URL",
        help="Where jobs and results live: sqlite:///FILE or postgresql://USER@HOST/NAME.",
    ),
]
Broker = Annotated[
    str,
    typer.Option(
        "--broker",
        envvar="NIGHTDRAFT_BROKER",
        metavar="URL",
        help="Message broker: redis://HOST:6379/0 or amqp://USER@HOST//.",
    ),
]
OptionalBroker = Annotated[
    str | None,
    typer.Option("--broker", envvar="NIGHTDRAFT_BROKER", metavar="URL", help="Message broker that is checked as well."),
]
DEFAULT_BROKER = "redis://localhost:6379/0"

New = Annotated[bool, typer.Option("--new", help="Start a fresh job where one of that name exists.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
JobName = Annotated[str, typer.Argument(metavar="JOB", help="Name or id of a job, the beginning of an id, or 'last'.")]
