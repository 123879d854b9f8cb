"""What scheduler and workers agree on to meet on the broker: names and delivery settings. No Celery is imported here.

SQL is the truth and a message is a hint, so these settings only decide how soon a hint arrives: a lost message is
published again from SQL, a duplicate one meets a newer epoch and does nothing.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

TASK_NAME = "nightdraft.process_chunk"
"""Keyword arguments: job_id, chunk_id, epoch (the fields of `storage.records.ChunkMessage`)."""

QUEUE_NAME = "nightdraft.chunks"
"""Queue of a broker URL that names none. Two stores on one broker need a queue each: redis://HOST/0?queue=NAME."""

REDIS_SCHEMES = ("redis", "rediss")
RABBITMQ_SCHEMES = ("amqp", "amqps")

REDIS_VISIBILITY_SECONDS = 900
"""Redis hands a message that was not acknowledged for this long to another worker. A chunk that runs longer is then
delivered twice, which is harmless; a worker that died before it claimed its chunk is covered sooner, from SQL."""

RABBITMQ_CONSUMER_TIMEOUT_MS = 24 * 3600 * 1000
"""RabbitMQ closes the channel of a consumer that holds a message longer than this (30 minutes unless told)."""

NETWORK_TIMEOUT_SECONDS = 10
"""Limit for one round trip to the broker while publishing; connecting gets half of it."""


class UnsupportedBroker(ValueError):
    """The broker URL has a scheme that nightdraft does not support; the message names those that it does."""


def broker_settings(url: str) -> dict[str, Any]:
    """Celery settings (lower-case names) for everything that touches delivery, equal on both sides of the wire.

    `url` may end in ?queue=NAME. The worker adds its own pool and concurrency. Raises `UnsupportedBroker`.
    """
    scheme = urlsplit(url).scheme
    if scheme not in REDIS_SCHEMES + RABBITMQ_SCHEMES:
        raise UnsupportedBroker(
            f"broker URL {redacted(url)!r}: scheme {scheme!r} is not supported; use redis://, rediss://, amqp:// or amqps://"
        )
    is_redis = scheme in REDIS_SCHEMES
    server, queue = _server_and_queue(url)
    return {
        "broker_url": server,
        "broker_transport_options": _redis_options() if is_redis else {"confirm_publish": True},
        "broker_connection_timeout": NETWORK_TIMEOUT_SECONDS / 2,
        "broker_connection_retry": True,
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,
        "task_default_queue": queue,
        "task_default_exchange": queue,
        "task_default_routing_key": queue,
        "task_queues": {
            queue: _declaration(queue, {} if is_redis else {"x-consumer-timeout": RABBITMQ_CONSUMER_TIMEOUT_MS})
        },
        "task_create_missing_queues": False,
        "task_default_delivery_mode": "persistent",
        "task_serializer": "json",
        "accept_content": ["json"],
        "task_ignore_result": True,
        "task_acks_late": True,
        "task_acks_on_failure": True,
        "task_acks_on_timeout": True,
        "task_reject_on_worker_lost": False,
        "worker_prefetch_multiplier": 1,
        "worker_cancel_long_running_tasks_on_connection_loss": False,
    }


def redacted(url: str) -> str:
    """The URL without its password, for messages and logs."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    return url.replace(f":{parts.password}@", ":***@", 1)


def _redis_options() -> dict[str, Any]:
    return {
        "visibility_timeout": REDIS_VISIBILITY_SECONDS,
        # Kombu sweeps for overdue messages every interval * throttle seconds; its defaults make that 100.
        "unacked_restore_interval": 10,
        "unacked_restore_throttle": 1,
        "socket_connect_timeout": NETWORK_TIMEOUT_SECONDS / 2,
        "socket_keepalive": True,
        "health_check_interval": 10,
    }


def _server_and_queue(url: str) -> tuple[str, str]:
    """The URL without its queue parameter, and the queue."""
    server, _, query = url.partition("?")
    parameters = dict(parse_qsl(query, keep_blank_values=True))
    queue = parameters.pop("queue", QUEUE_NAME)
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,200}", queue):
        raise UnsupportedBroker(
            f"queue name {queue!r} in the broker URL: use letters, digits, dots, dashes, underscores"
        )
    return f"{server}?{urlencode(parameters)}" if parameters else server, queue


def _declaration(queue: str, arguments: dict[str, Any]) -> dict[str, Any]:
    # A classic durable queue: persistent messages survive a broker restart, and what a lost node takes with it comes
    # back from SQL. A quorum queue would add nothing to that and makes every worker declare 28 delay queues.
    return {
        "exchange": queue,
        "exchange_type": "direct",
        "routing_key": queue,
        "durable": True,
        "queue_arguments": arguments,
    }
