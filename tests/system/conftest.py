"""Brokers of the system tests. Every test has the queue to itself."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

import pytest

from tests.system.cluster import Cluster

REQUIRED = os.environ.get("NIGHTDRAFT_REQUIRE_SERVICES") == "1"


def missing(reason: str) -> NoReturn:
    if REQUIRED:
        pytest.fail(f"{reason} (and NIGHTDRAFT_REQUIRE_SERVICES=1)")
    pytest.skip(reason)


class RedisServer:
    """A Redis of the test's own, which forgets everything when it is restarted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        log = self._folder / "redis.log"
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                ["redis-server", *options], cwd=self._folder, stdout=output, stderr=subprocess.STDOUT
            )
        for _ in range(100):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.05)
        raise AssertionError(f"redis-server did not start: {log.read_text()}")

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[RedisServer]:
    if shutil.which("redis-server") is None:
        missing("there is no redis-server to start")
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.stop()


def rabbitmqctl(*arguments: str) -> str:
    """Raises `CalledProcessError` when the command is refused."""
    done = subprocess.run(["rabbitmqctl", "-q", *arguments], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


@pytest.fixture(scope="session")
def rabbitmq_vhost(rabbitmq_url: str) -> Iterator[str]:
    """A virtual host of this session's own: nobody else's workers take its messages."""
    name = f"nightdraft-test-{uuid.uuid4().hex[:8]}"
    user = urlsplit(rabbitmq_url).username or "guest"
    try:
        rabbitmqctl("add_vhost", name)
        rabbitmqctl("set_permissions", "-p", name, user, ".*", ".*", ".*")
    except (OSError, subprocess.SubprocessError) as error:
        missing(f"rabbitmqctl cannot make a virtual host: {error}")
    yield name
    rabbitmqctl("delete_vhost", name)


@pytest.fixture
def rabbitmq_broker(rabbitmq_url: str, rabbitmq_vhost: str) -> str:
    return rabbitmq_url.rstrip("/") + "/" + rabbitmq_vhost


@pytest.fixture(params=["redis", "rabbitmq"])
def broker_url(request: pytest.FixtureRequest) -> str:
    """Each broker in turn."""
    if request.param == "redis":
        server: RedisServer = request.getfixturevalue("redis_server")
        return server.url
    url: str = request.getfixturevalue("rabbitmq_broker")
    return url


@pytest.fixture
def make_cluster(tmp_path: Path) -> Callable[[str, str], Cluster]:
    return lambda broker_url, store_url: Cluster(broker_url, store_url, tmp_path)
