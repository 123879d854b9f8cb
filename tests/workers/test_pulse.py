"""What a worker tells the store about itself while it runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from sqlalchemy import func, select

from storage.store import Store
from storage.tables import engine_samples, models
from tests.workers.fakes import Script
from tests.workers.jobs import make_job
from workers.engine.config import EngineConfig, SpeculationConfig
from workers.host import EngineHost
from workers.hosts import EngineHosts
from workers.pulse import Pulse, record_what_runs


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


def test_the_models_of_a_job_are_on_record_the_draft_too(store: Store, tmp_path: Path) -> None:
    job = make_job(store, tmp_path, {"prompt": ["a"]})
    target, draft = "scripted:seed=1,order=1", "scripted:seed=2,order=1"
    host = EngineHost(EngineConfig(target, speculation=SpeculationConfig(method="draft_model", draft=draft)))
    host.start()
    try:
        record_what_runs(store, job.id, host)
    finally:
        host.stop()
    columns = (models.c.role, models.c.name, models.c.content_hash, models.c.report)
    found = store.database.read(lambda connection: connection.execute(select(*columns)).all())
    rows = {row.role: row for row in found}
    assert {role: row.name for role, row in rows.items()} == {"target": target, "draft": draft}
    assert rows["draft"].content_hash != rows["target"].content_hash
    assert rows["draft"].report == {
        "name": draft, "content_hash": rows["draft"].content_hash, "dtype": "float32", "weight_bytes": 0,
    }  # fmt: skip
