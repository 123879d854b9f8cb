"""What scheduler and workers agree on to meet on the broker: names and delivery settings. No Celery is imported here.

SQL is the truth and a message is a hint, so these settings only decide how soon a hint arrives: a lost message is
published again from SQL, a duplicate one meets a newer epoch and does nothing.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from storage.errors import USAGE, NightdraftError
from storage.redaction import is_secret, redacted

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


QUERY_KEYS = ("connect_timeout", "heartbeat", "login_method", "queue")
"""What may stand behind the "?" of a broker URL, beside ssl_*; a failover list has it behind any of its URLs."""


class UnsupportedBroker(NightdraftError, ValueError):
    """The broker URL is wrong, or has a scheme that nightdraft does not support; the message says what it may be."""

    exit_code = USAGE


def broker_settings(url: str) -> dict[str, Any]:
    """Celery settings (lower-case names) for everything that touches delivery, equal on both sides of the wire.

    `url` may end in ?queue=NAME, and may be a failover list: URLs of one scheme with ";" between them. The worker adds
    its own pool and concurrency. Raises `UnsupportedBroker`.
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
    """The URL, or list of URLs, without its queue parameter, and the queue."""
    servers: list[str] = []
    queues: set[str] = set()
    # A password may hold a semicolon; one before a scheme begins the next URL.
    for entry in re.split(r";(?=\w[\w+.-]*://)", url):
        server, queue = _entry(entry)
        servers.append(server)
        queues.update([queue] if queue else [])
    if len(queues) > 1:
        raise UnsupportedBroker(f"the URLs of {redacted(url)!r} name several queues: {', '.join(sorted(queues))}")
    return ";".join(servers), queues.pop() if queues else QUEUE_NAME


def _entry(url: str) -> tuple[str, str | None]:
    """One URL without its queue parameter, and its queue. Raises `UnsupportedBroker` for what no broker takes."""
    server, _, query = url.partition("?")
    parts = urlsplit(server)
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port == 0:
        raise UnsupportedBroker(
            f"broker URL {redacted(url)!r}: the port is not a number from 1 to 65535; a password with one of / : @ ? # "
            "needs it percent-encoded, as in p%40ss"
        )
    if parts.scheme in REDIS_SCHEMES and not re.fullmatch(r"/?\d*", parts.path):
        raise UnsupportedBroker(f"broker URL {redacted(url)!r}: behind the host stands the database's number, as in /0")
    parameters = dict(parse_qsl(query, keep_blank_values=True))
    queue = parameters.pop("queue", None)
    for key in parameters:
        if key not in QUERY_KEYS and not key.startswith("ssl_"):
            secret = "; user and password stand before the host: ://USER:PASSWORD@HOST" if is_secret(key) else ""
            known = f"{', '.join(QUERY_KEYS)} and ssl_*"
            raise UnsupportedBroker(
                f"broker URL {redacted(url)!r}: unknown parameter {key!r}{secret}; there are {known}"
            )
    if queue is not None and not re.fullmatch(r"[A-Za-z0-9._-]{1,200}", queue):
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
