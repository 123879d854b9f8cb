"""A queue that holds anything: a real worker logs and drops it, and processes what comes next."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import kombu
import pytest
import redis
from amqp.basic_message import Message

from scheduler.daemon.publisher import CeleryPublisher
from storage.records import ChunkMessage, JobState
from storage.wire import QUEUE_NAME, TASK_NAME
from tests.support.cluster.cluster import Cluster
from tests.support.services.brokers import BrokerServer
from tests.support.waiting import wait_until

pytestmark = pytest.mark.service

HEADERS = {"task": TASK_NAME, "id": "x"}
JSON = {"content_type": "application/json", "content_encoding": "utf-8"}
MakeCluster = Callable[[str, str], Cluster]


def fuzz(job_id: str, chunk_id: int) -> Iterator[tuple[Any, dict[str, Any], dict[str, Any]]]:
    """Bodies, headers and properties of messages, each wrong in a way of its own."""
    hint: dict[str, Any] = {"job_id": job_id, "chunk_id": chunk_id, "epoch": 0}
    values: tuple[Any, ...] = (None, [], {}, True, 1.5, -1, 2**70, "last\x00")
    bodies = [
        *("text", '"a JSON string"', '"args"', "5", "null", "true", "[]", "{}", '{"args": 5}', "\x00", ""),
        *("[[], {}]", "[5, 6, 7]", "[[[],{}],{}]", '[["args"], {"kwargs": 1}, {}]', "[" * 50_000),
        '{"__type__": "bytes", "__value__": 3}',
        json.dumps([[1, 2, 3], {}, {}]),
        json.dumps([[], {"job_id": "j"}, {}]),
        json.dumps([[], {**hint, "more": 1}, {}]),
        *(json.dumps([[], {**hint, name: value}, {}]) for name in hint for value in values),
        json.dumps({"task": TASK_NAME, "id": "v1", "args": [], "kwargs": hint}),
        json.dumps([[], {**hint, "job_id": "x" * 10_000_000}, {}]),
    ]
    for body in bodies:
        yield body, HEADERS, JSON
    good = json.dumps([[], {**hint, "epoch": 99}, {"callbacks": [{"task": "evil"}], "chord": 5, "chain": ["x"]}])
    for name in ("task", "id", "lang", "eta", "expires", "timelimit", "retries", "shadow", "compression", "argsrepr"):
        for value in (None, [], {"a": 1}, "nonsense", -1, "gzip", "9999-12-31T23:59:59+00:00", True):
            yield good, {**HEADERS, name: value}, JSON
    yield good, {}, JSON
    yield good, {"task": TASK_NAME}, JSON
    for kind in ("application/x-python-serialize", "application/data", "text/plain", "no/such", "", "\N{SNOWMAN}"):
        yield good, HEADERS, {**JSON, "content_type": kind}
    for encoding in ("binary", "no-such-encoding", "utf-16", ""):
        yield good, HEADERS, {**JSON, "content_encoding": encoding}


def raw_redis_items(job_id: str) -> list[bytes]:
    """What no client of kombu would write."""
    whole: dict[str, Any] = {
        "body": "e30=", "content-type": "application/json", "content-encoding": "utf-8", "headers": HEADERS,
        "properties": {"body_encoding": "base64", "delivery_tag": "t", "delivery_info": {"exchange": ""}},
    }  # fmt: skip
    values: tuple[Any, ...] = (None, [], "x", 5, {}, {"compression": ["x"]}, {"body_encoding": "no-such"})
    broken = [{**whole, name: value} for name in whole for value in values]
    broken += [{key: value for key, value in whole.items() if key != name} for name in whole]
    return [b"", b"\xff\xfe", b"{", b"5", b"null", b'"x"', b"[]", *(json.dumps(each).encode() for each in broken)]


def test_no_message_can_end_a_worker(make_cluster: MakeCluster, broker_server: BrokerServer, postgres_url: str) -> None:
    with make_cluster(broker_server.url, postgres_url) as cluster:
        first = cluster.submit(["one"], target="light:1", name="first")
        worker = cluster.start_worker()
        (chunk,) = cluster.store.chunks.of_job(first.id)
        messages = list(fuzz(first.id, chunk.id))
        with kombu.Connection(broker_server.url) as connection:
            publish(connection, messages)
            if broker_server.url.startswith("redis"):
                with redis.Redis.from_url(broker_server.url) as server:
                    server.lpush(QUEUE_NAME, *raw_redis_items(first.id))
            else:
                publish_unreadable_properties(connection)
        # A hint of a job and a chunk of another one: its rows would be answered under the wrong spec.
        other = cluster.submit(["two"], target="light:1", name="other")
        publisher = CeleryPublisher(broker_server.url)
        publisher.publish(ChunkMessage(other.id, chunk.id, chunk.epoch))
        publisher.publish(ChunkMessage(other.name, chunk.id + 1, 0))
        with cluster.scheduling(first):
            for job in (first, other):
                assert cluster.wait_finished(job).state is JobState.COMPLETED
        wait_until(lambda: publisher.waiting() == 0, "the queue is empty")
        publisher.close()
        assert worker.alive
        log = worker.output()
        assert "Traceback" not in log
        assert "Connection to broker lost" not in log
        assert log.count("was dropped") > 40
        assert len(log) < 400_000
        assert [chunk.epoch for job in (first, other) for chunk in cluster.store.chunks.of_job(job.id)] == [1, 1]


def publish(connection: kombu.Connection, messages: list[tuple[Any, dict[str, Any], dict[str, Any]]]) -> None:
    queue = kombu.Queue(
        QUEUE_NAME,
        kombu.Exchange(QUEUE_NAME, "direct"),
        QUEUE_NAME,
        queue_arguments={} if "redis" in connection.transport_cls else {"x-consumer-timeout": 24 * 3600 * 1000},
    )
    with connection.channel() as channel:
        queue.bind(channel).declare()
        for body, headers, properties in messages:
            durable = {"delivery_mode": 2}
            message = channel.prepare_message(body.encode(), headers=headers, properties=durable, **properties)
            channel.basic_publish(message, exchange=QUEUE_NAME, routing_key=QUEUE_NAME)


def publish_unreadable_properties(connection: kombu.Connection) -> None:
    """Valid to RabbitMQ, and to no Python client: text that is not UTF-8, a time past the year 9999."""
    shortstr = b"\x03\xff\xfe\xfd"
    table = b"\x01tT\xff\xff\xff\xff\xff\xff\xff\xff"
    with connection.channel() as channel:
        for flags, values in ((0x8000, shortstr), (0x0400, shortstr), (0x2000, len(table).to_bytes(4, "big") + table)):
            message = Message("{}")
            raw = flags.to_bytes(2, "big") + values
            message._serialize_properties = partial(bytes, raw)
            channel.basic_publish(message, exchange=QUEUE_NAME, routing_key=QUEUE_NAME)
