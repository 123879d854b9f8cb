"""Brokers of the system tests: servers of their own, to be killed at will, whose messages nobody else takes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import kombu
import pytest

from storage.wire import QUEUE_NAME
from tests.support.cluster.cluster import Cluster
from tests.support.services.brokers import BrokerServer, free_ports, rabbitmq_script
from tests.support.services.urls import missing


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
