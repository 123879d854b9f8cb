"""The Celery application."""

from __future__ import annotations

import pytest

from storage.store.store import Store
from storage.wire import QUEUE_NAME, TASK_NAME, UnsupportedBroker
from workers.chunks.worker import Worker
from workers.queue.app import create_app
from workers.queue.tasks import register


@pytest.mark.parametrize("url", ["redis://localhost:6379/0", "amqp://guest@localhost//"])
def test_messages_are_acknowledged_late_and_fetched_one_at_a_time(url: str) -> None:
    conf = create_app(url).conf
    assert conf.task_acks_late
    assert conf.worker_prefetch_multiplier == 1
    assert conf.worker_pool == "threads"
    assert conf.task_default_queue == QUEUE_NAME
    assert not conf.worker_enable_remote_control


def test_overrides_go_over_the_settings() -> None:
    options = {"broker_transport_options": {"visibility_timeout": 5}}
    assert create_app("redis://localhost", options).conf.broker_transport_options == {"visibility_timeout": 5}


def test_other_brokers_are_refused() -> None:
    with pytest.raises(UnsupportedBroker, match="filesystem"):
        create_app("filesystem://")


def test_the_one_task_has_the_name_that_the_scheduler_sends_to(store: Store) -> None:
    app = create_app("redis://localhost")
    with Worker(store) as worker:
        register(app, worker)
    assert app.tasks[TASK_NAME].acks_late
