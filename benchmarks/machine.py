"""What else the machine did: a benchmark without it means little on a shared one."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil


@dataclass(slots=True)
class Load:
    """Average number of cores that other processes kept busy meanwhile."""

    foreign_cores: float = 0.0


@contextmanager
def foreign_load() -> Iterator[Load]:
    """Measure the CPU time of everybody but this process and its children."""
    load = Load()
    started, everybody, own = time.monotonic(), _busy_seconds(), _own_seconds()
    yield load
    elapsed = time.monotonic() - started
    load.foreign_cores = max(0.0, (_busy_seconds() - everybody - (_own_seconds() - own)) / elapsed)


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.system + getattr(times, "nice", 0.0) + getattr(times, "irq", 0.0))


def _own_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def describe() -> str:
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
