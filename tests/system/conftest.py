"""Brokers of the system tests: servers of their own, to be killed at will, whose messages nobody else takes."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import kombu
import pytest

from storage.wire import QUEUE_NAME
from tests.system.cluster import Cluster

REQUIRED = os.environ.get("NIGHTDRAFT_REQUIRE_SERVICES") == "1"
START_SECONDS = 60.0


def missing(reason: str) -> NoReturn:
    if REQUIRED:
        pytest.fail(f"{reason} (and NIGHTDRAFT_REQUIRE_SERVICES=1)")
    pytest.skip(reason)


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


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[BrokerServer]:
    """A Redis that forgets everything when it is killed."""
    if shutil.which("redis-server") is None:
        missing("there is no redis-server to start")
    (port,) = free_ports(1)
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    server = BrokerServer(command, {}, tmp_path, port, f"redis://127.0.0.1:{port}/0")
    server.start()
    yield server
    server.kill()


def rabbitmq_script() -> str | None:
    """The server's own script: the wrapper on the PATH would change the user, and cannot run a second node."""
    scripts = sorted(Path("/usr/lib/rabbitmq/lib").glob("rabbitmq_server-*/sbin/rabbitmq-server"))
    return str(scripts[-1]) if scripts else shutil.which("rabbitmq-server")


@pytest.fixture(scope="session")
def _rabbitmq_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerServer]:
    script = rabbitmq_script()
    if script is None:
        missing("there is no rabbitmq-server to start")
    folder = tmp_path_factory.mktemp("rabbitmq")
    plugins = folder / "plugins"
    plugins.write_text("[].")
    port, distribution = free_ports(2)
    environment = {
        "RABBITMQ_NODENAME": f"nightdraft-test-{port}@localhost",
        "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_DIST_PORT": str(distribution),
        "RABBITMQ_MNESIA_BASE": str(folder / "data"),
        "RABBITMQ_LOG_BASE": str(folder / "log"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(plugins),
        "RABBITMQ_CONF_ENV_FILE": os.devnull,
        "RABBITMQ_CONFIG_FILE": str(folder / "none"),
    }
    server = BrokerServer([script], environment, folder, port, f"amqp://guest:guest@127.0.0.1:{port}//")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def rabbitmq_server(_rabbitmq_node: BrokerServer) -> Iterator[BrokerServer]:
    """A RabbitMQ node, running, with an empty queue after the test."""
    yield _rabbitmq_node
    with kombu.Connection(_rabbitmq_node.url) as connection, connection.channel() as channel:
        channel.queue_delete(QUEUE_NAME)


@pytest.fixture(params=["redis", "rabbitmq"])
def broker_server(request: pytest.FixtureRequest) -> BrokerServer:
    """Each broker in turn."""
    server: BrokerServer = request.getfixturevalue(f"{request.param}_server")
    return server


@pytest.fixture
def make_cluster(tmp_path: Path) -> Callable[[str, str], Cluster]:
    """Given broker and store URLs, makes a cluster whose files are the test's own."""
    return lambda broker_url, store_url: Cluster(broker_url, store_url, tmp_path)
