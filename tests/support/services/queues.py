"""A queue of a test's own on a real broker, as a worker sees it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery import Celery

from storage.wire import broker_settings


@contextmanager
def broker_queue(server_url: str) -> Iterator[Any]:
    """The bound queue, declared; deleted afterwards."""
    name = f"test-{uuid.uuid4().hex[:12]}"
    app = Celery("test", set_as_current=False)
    app.conf.update(broker_settings(f"{server_url}?queue={name}"))
    with app.connection_for_read() as connection:
        bound = app.amqp.queues[name].bind(connection.default_channel)
        bound.declare()
        yield bound
        bound.delete()
