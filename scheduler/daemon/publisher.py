"""Putting chunk messages on the broker, confirmed one by one."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Protocol
from urllib.parse import urlsplit

import redis
from amqp.exceptions import AccessRefused, NotAllowed
from celery import Celery
from kombu.exceptions import OperationalError

from scheduler.errors import BrokerRefused, BrokerUnavailable
from storage.records import ChunkMessage
from storage.redaction import redacted
from storage.wire import NETWORK_TIMEOUT_SECONDS, REDIS_SCHEMES, TASK_NAME, broker_settings


class Publisher(Protocol):
    """Where the scheduler's messages go. Calls come from one thread at a time."""

    lasting: bool
    """Whether messages outlive this process. The chunks of those that do are marked as dispatched; the others stay free
    for whoever comes."""

    def publish(self, message: ChunkMessage) -> None:
        """Return once the broker has the message. Raises `BrokerUnavailable`; the message may then exist or not."""

    def waiting(self) -> int:
        """Messages that no worker has taken yet. Raises `BrokerUnavailable`."""

    def close(self) -> None:
        """Let go of the connection; a later call opens a new one."""


class CeleryPublisher:
    """Publishes to the workers' queue by task name. Connects on first use, and again after every failure.

    Raises `storage.wire.UnsupportedBroker` for a URL that is neither Redis nor RabbitMQ.
    """

    lasting = True

    def __init__(self, broker_url: str) -> None:
        self._url = broker_url
        self._app = Celery("nightdraft", set_as_current=False)
        self._app.conf.update(broker_settings(broker_url))
        self._queue = str(self._app.conf.task_default_queue)
        self._timeouts = _timeouts(broker_url)
        self._connection: Any = None
        self._producer: Any = None

    def publish(self, message: ChunkMessage) -> None:
        with self._connected() as producer:
            self._app.send_task(
                TASK_NAME,
                kwargs=asdict(message),
                queue=self._queue,
                producer=producer,
                retry=False,
                confirm_timeout=NETWORK_TIMEOUT_SECONDS,
            )

    def waiting(self) -> int:
        with self._connected() as producer:
            queue = self._app.amqp.queues[self._queue].bind(producer.channel)
            return int(queue.queue_declare().message_count)

    def close(self) -> None:
        connection, self._connection, self._producer = self._connection, None, None
        if connection is not None:
            connection.collect(socket_timeout=1)

    @contextmanager
    def _connected(self) -> Iterator[Any]:
        """The producer; whatever the broker does wrong comes out as `BrokerUnavailable`, with the connection closed."""
        connection = self._connection
        if connection is None:
            connection = self._connection = self._app.connection_for_write(
                heartbeat=0, transport_options={**self._app.conf.broker_transport_options, **self._timeouts}
            )
        try:
            if self._producer is None:
                # One try for each host of a failover list; waiting and trying again is the scheduler's business.
                hosts = len(connection.alt) or 1
                connection.ensure_connection(
                    max_retries=hosts - 1, interval_start=0, interval_step=0, reraise_as_library_errors=False
                )
                self._producer = self._app.amqp.Producer(connection)
            yield self._producer
        except (OperationalError, OSError, *connection.connection_errors, *connection.channel_errors) as error:
            self.close()
            kind = BrokerRefused if _is_refused(error) and len(connection.alt) <= 1 else BrokerUnavailable
            raise kind(redacted(f"broker {self._url}: {type(error).__name__}: {error}", self._url)) from error


def _is_refused(error: BaseException | None) -> bool:
    """Whether a user, a password, a virtual host or the name of the server is what the broker fails for."""
    if error is None:
        return False
    if isinstance(error, socket.gaierror):
        return error.errno != socket.EAI_AGAIN
    for_good = isinstance(error, AccessRefused | NotAllowed | redis.AuthenticationError)
    return for_good or _is_refused(error.__cause__ or error.__context__)


def _timeouts(broker_url: str) -> dict[str, float]:
    if urlsplit(broker_url).scheme in REDIS_SCHEMES:
        return {"socket_timeout": NETWORK_TIMEOUT_SECONDS}
    return {"read_timeout": NETWORK_TIMEOUT_SECONDS, "write_timeout": NETWORK_TIMEOUT_SECONDS}
