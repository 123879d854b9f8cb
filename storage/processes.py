"""Which process a worker is, across containers, machines and restarts, and whether it still runs."""

from __future__ import annotations

import os
import socket
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path

import psutil

_PROC = Path("/proc")
_NO_MORE = (b"Z", b"X", b"x")
"""States in /proc/PID/stat of a process that has ended and was not collected by its parent yet."""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process number means nothing without the kernel, the PID namespace and the start that it belongs to."""

    hostname: str
    pid: int
    boot_id: str | None = None
    """Of the running kernel; where there is no such thing (not Linux), the network card's address. None: unknown."""
    pid_namespace: str | None = None
    """Containers of one machine have one each. None: the platform has none."""
    start: str | None = None
    """When the process was started, in the platform's own unit."""


def this_process() -> ProcessIdentity:
    hostname, pid = socket.gethostname(), os.getpid()
    if sys.platform != "linux":
        return ProcessIdentity(hostname, pid, f"{uuid.getnode():012x}", None, _start_of(pid))
    try:
        # A /proc of another PID namespace (a container with the host's) would show other processes under our numbers.
        if (_PROC / "self").readlink().name != str(pid):
            return ProcessIdentity(hostname, pid)
        boot_id = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return ProcessIdentity(hostname, pid, boot_id, str((_PROC / "self/ns/pid").readlink()), _start_of(pid))
    except OSError:
        return ProcessIdentity(hostname, pid)


def has_ended(process: ProcessIdentity, observer: ProcessIdentity) -> bool:
    """Whether that process is known to run no more; False for one that this one, the `observer`, cannot see."""
    place = (process.boot_id, process.pid_namespace)
    if process.boot_id is None or process.start is None or place != (observer.boot_id, observer.pid_namespace):
        return False
    try:
        return _start_of(process.pid) != process.start
    except PermissionError:
        return False


def _start_of(pid: int) -> str | None:
    """When the process of that number was started; None when there is none. Raises `PermissionError` when hidden."""
    try:
        if sys.platform != "linux":
            return f"{psutil.Process(pid).create_time():.2f}"
        # psutil adds the time of the boot, which moves with the clock; the kernel's own count does not.
        state, *fields = (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
        return None if state in _NO_MORE else fields[18].decode()
    except psutil.AccessDenied as error:
        raise PermissionError(f"process {pid} is hidden") from error
    except (FileNotFoundError, ProcessLookupError):
        _require_gone(pid)
        return None
    except psutil.NoSuchProcess:
        return None


def _require_gone(pid: int) -> None:
    """Raise `PermissionError` for a process that is there, behind a /proc that is mounted with hidepid."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return
    raise PermissionError(f"process {pid} is hidden")
