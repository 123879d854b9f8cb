"""Names and ids of jobs."""

from __future__ import annotations

import re
import secrets
from itertools import count

from scheduler.errors import InvalidJob
from storage.store.store import Store

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
RESERVED_NAMES = ("last",)
"""Words that mean a job without being its name."""


def check_name(name: str) -> str:
    """The name itself. Raises `InvalidJob`: a name is also typed in shells and used in file names."""
    if not NAME_PATTERN.fullmatch(name):
        raise InvalidJob(
            f"job name {name!r}: use 1 to 100 letters, digits, dots, dashes and underscores, a letter or digit first"
        )
    if name.lower() in RESERVED_NAMES:
        raise InvalidJob(f"job name {name!r} is reserved: it stands for the newest job; choose another")
    return name


def next_free_name(store: Store, name: str) -> str:
    """`name` if no job has it, else the first free of name-2, name-3, ..."""
    if store.jobs.find(name) is None:
        return name
    return next(free for free in (f"{name}-{number}" for number in count(2)) if store.jobs.find(free) is None)


def new_job_id() -> str:
    """16 random hexadecimal digits; a few of them are enough to name a job on the command line."""
    return secrets.token_hex(8)
