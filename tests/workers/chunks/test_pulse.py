"""What a worker tells the store about itself while it runs."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import func, select

from storage.records import Job
from storage.sql.tables import engine_samples, models
from storage.store.query import run_sql
from storage.store.store import Store
from tests.support.fake_engine import Script
from tests.support.jobs import make_job, process_next
from tests.support.waiting import wait_until
from workers.chunks.pulse import Pulse, record_what_runs
from workers.chunks.worker import Worker
from workers.engine.api.config import EngineConfig, SpeculationConfig
from workers.hosting.host import EngineHost
from workers.hosting.shared import EngineHosts


def num_samples(store: Store) -> int:
    counting = select(func.count()).select_from(engine_samples)
    return store.database.read(lambda connection: int(connection.execute(counting).scalar_one()))


def test_a_worker_shows_that_it_lives_and_samples_its_engine_while_it_has_one(store: Store) -> None:
    hosts = EngineHosts(Script().factory)
    pulse = Pulse(store, hosts, "worker-1", seconds=0.02)
    pulse.start()
    wait_until(lambda: bool(store.telemetry.workers()))
    assert num_samples(store) == 0
    with hosts.use(EngineConfig(target="fake"), lambda: False):
        wait_until(lambda: num_samples(store) >= 2)
    pulse.stop()
    hosts.close()
    assert store.telemetry.workers() == []


def test_the_models_of_a_job_are_on_record_the_draft_too(store: Store, tmp_path: Path) -> None:
    job = make_job(store, tmp_path, {"prompt": ["a"]})
    target, draft = "scripted:seed=1,order=1", "scripted:seed=2,order=1"
    host = EngineHost(EngineConfig(target, speculation=SpeculationConfig(method="draft_model", draft=draft)))
    host.start()
    try:
        record_what_runs(store, "worker-1", job.id, host)
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


def read_tokens(store: Store, job: Job) -> int:
    """Output tokens of a job by the readings of the engines that worked on it."""
    _, rows = run_sql(
        store,
        "SELECT sum(output_tokens_per_second * seconds), sum(seconds) FROM engine_throughput "
        f"WHERE job_id = '{job.id}' AND seconds > 0",
    )
    [(tokens, _)] = rows
    return round(tokens)


def scripted(store: Store, folder: Path, name: str, target: str = "scripted:eos_every=8") -> Job:
    prompts = {"prompt": [f"{name} {row}" for row in range(12)]}
    speculation = {"method": "draft_model", "draft": "target", "policy": "fixed"}
    engine = {"target": target, "max_batch": 4, "kv_blocks": 64, "speculation": speculation}
    return make_job(store, folder, prompts, name=name, chunk_rows=4, engine=engine)


def test_a_short_job_has_readings_of_all_its_tokens(store: Store, tmp_path: Path) -> None:
    job = scripted(store, tmp_path, "short")
    with Worker(store) as worker:
        while process_next(worker, job) is not None:
            pass
    progress = store.jobs.progress(job.id)
    assert progress.counts.num_ok == 12
    assert read_tokens(store, job) == progress.counts.num_output_tokens
    columns = ("num_output_tokens", "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens")
    _, rows = run_sql(store, f"SELECT {', '.join(columns)} FROM engine_samples ORDER BY sampled_at DESC LIMIT 1")
    assert [list(row) for row in rows] == [[getattr(progress.counts, column) for column in columns]]


def test_jobs_in_turns_on_one_worker_have_their_own_tokens_each(store: Store, tmp_path: Path) -> None:
    """On one engine, and on one that replaces another."""
    first, second = scripted(store, tmp_path, "first"), scripted(store, tmp_path, "second")
    other = scripted(store, tmp_path, "other", "scripted:eos_every=5")
    with Worker(store) as worker:
        for job in (first, second, other) * 3:
            assert process_next(worker, job) is not None
    for job in (first, second, other):
        assert read_tokens(store, job) == store.jobs.progress(job.id).counts.num_output_tokens > 0


def test_what_an_engine_did_before_it_broke_is_read(store: Store, tmp_path: Path) -> None:
    job = scripted(store, tmp_path, "broken", "scripted:eos_every=8,fail_on=broken 11")
    with Worker(store) as worker:
        for _ in range(3):
            assert process_next(worker, job) is not None
    progress = store.jobs.progress(job.id)
    assert progress.counts.num_ok >= 8
    assert read_tokens(store, job) >= progress.counts.num_output_tokens > 0
