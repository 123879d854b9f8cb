"""What a worker tells the store about itself while it runs."""

from __future__ import annotations

import time
from collections.abc import Callable

from sqlalchemy import func, select

from storage.store import Store
from storage.tables import engine_samples
from tests.workers.fakes import Script
from workers.engine.config import EngineConfig
from workers.hosts import EngineHosts
from workers.pulse import Pulse


def num_samples(store: Store) -> int:
    counting = select(func.count()).select_from(engine_samples)
    return store.database.read(lambda connection: int(connection.execute(counting).scalar_one()))


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(600):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("it did not happen within 30 s")


def test_a_worker_shows_that_it_lives_and_samples_its_engine_while_it_has_one(store: Store) -> None:
    hosts = EngineHosts(Script().factory)
    pulse = Pulse(store, hosts, "worker-1", seconds=0.02)
    pulse.start()
    wait_until(lambda: bool(store.list_workers()))
    assert num_samples(store) == 0
    with hosts.use(EngineConfig(target="fake"), lambda: False):
        wait_until(lambda: num_samples(store) >= 2)
    pulse.stop()
    hosts.close()
    assert store.list_workers() == []
