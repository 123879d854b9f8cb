"""Brokers of a test's own: processes to be killed at will, whose messages nobody else takes."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

START_SECONDS = 60.0


class BrokerServer:
    """A broker process that can be killed and started again on the same port."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], folder: Path, port: int, url: str) -> None:
        self.url = url
        self._command = list(command)
        self._environment = {**os.environ, **environment}
        self._folder = folder
        self._port = port
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        log = self._folder / "broker.log"
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_SECONDS
        while not is_open(self._port):
            assert self._process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)

    def kill(self) -> None:
        """End it at once, with every process that it started."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports: list[int] = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def rabbitmq_script() -> str | None:
    """The server's own script: the wrapper on the PATH would change the user, and cannot run a second node."""
    scripts = sorted(Path("/usr/lib/rabbitmq/lib").glob("rabbitmq_server-*/sbin/rabbitmq-server"))
    return str(scripts[-1]) if scripts else shutil.which("rabbitmq-server")
