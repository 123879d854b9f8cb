from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from scheduler.daemon.publisher import CeleryPublisher
from scheduler.errors import BrokerUnavailable
from storage.records import ChunkMessage
from storage.wire import TASK_NAME, UnsupportedBroker, broker_settings
from tests.support.services.proxy import Proxy
from tests.support.services.queues import broker_queue

MESSAGE = ChunkMessage("job", 7, 3)


@pytest.fixture(params=["redis_url", "rabbitmq_url"])
def server_url(request: pytest.FixtureRequest) -> str:
    url: str = request.getfixturevalue(request.param)
    return url


@pytest.fixture
def queue(server_url: str) -> Iterator[Any]:
    with broker_queue(server_url) as bound:
        yield bound


@pytest.fixture
def publisher(server_url: str, queue: Any) -> Iterator[CeleryPublisher]:
    publisher = CeleryPublisher(f"{server_url}?queue={queue.name}")
    yield publisher
    publisher.close()


@pytest.mark.service
def test_a_message_is_a_task_by_name_that_survives_a_restart(publisher: CeleryPublisher, queue: Any) -> None:
    publisher.publish(MESSAGE)
    received = queue.get()
    arguments, keywords, _ = received.payload
    assert (arguments, keywords) == ([], {"job_id": "job", "chunk_id": 7, "epoch": 3})
    assert received.headers["task"] == TASK_NAME
    assert received.properties["delivery_mode"] == 2
    received.ack()


@pytest.mark.service
def test_messages_that_wait_are_counted(publisher: CeleryPublisher, queue: Any) -> None:
    assert publisher.waiting() == 0
    publisher.publish(MESSAGE)
    publisher.publish(MESSAGE)
    assert publisher.waiting() == 2
    queue.get().ack()
    assert publisher.waiting() == 1


@pytest.mark.service
def test_a_cut_network_is_named_and_a_mended_one_is_used_again(server_url: str, queue: Any) -> None:
    with Proxy(server_url) as network:
        publisher = CeleryPublisher(f"{network.url}?queue={queue.name}")
        publisher.publish(MESSAGE)
        network.cut()
        for call in (lambda: publisher.publish(MESSAGE), publisher.waiting):
            with pytest.raises(BrokerUnavailable, match="broker "):
                call()
        network.mend()
        publisher.publish(MESSAGE)
        assert publisher.waiting() >= 2
        publisher.close()


def test_a_broker_that_is_not_there_is_named_without_its_password() -> None:
    publisher = CeleryPublisher("redis://:secret@127.0.0.1:1/0")
    with pytest.raises(BrokerUnavailable, match=r"broker redis://:\*\*\*@127\.0\.0\.1:1/0") as caught:
        publisher.publish(MESSAGE)
    assert "secret" not in str(caught.value)
    publisher.close()


@pytest.mark.parametrize("url", ["filesystem://", "sqla+sqlite:///x.db", "memory://", "localhost"])
def test_other_brokers_are_refused(url: str) -> None:
    with pytest.raises(UnsupportedBroker, match="use redis://"):
        CeleryPublisher(url)


def test_a_queue_of_its_own_is_named_in_the_url() -> None:
    settings = broker_settings("rediss://host/0?ssl_cert_reqs=required&queue=team-a")
    assert settings["broker_url"] == "rediss://host/0?ssl_cert_reqs=required"
    assert list(settings["task_queues"]) == [settings["task_default_queue"]] == ["team-a"]
    with pytest.raises(UnsupportedBroker, match="queue name"):
        broker_settings("redis://host/0?queue=a b")
