from __future__ import annotations

from datetime import UTC, datetime, timedelta

from storage.processes import ProcessIdentity
from storage.records import TokenCounts
from storage.store.store import Store
from storage.store.telemetry import EngineSample
from tests.support.records import add_job


def test_workers_report_and_sign_off(store: Store) -> None:
    process = ProcessIdentity("host", 1, "boot", "pid:[1]", "77")
    store.telemetry.worker_seen("a", process, "job")
    [first] = store.telemetry.workers()
    assert (first.worker_id, first.process, first.job_id) == ("a", process, "job")
    assert first.started_at == first.last_seen
    store.telemetry.worker_seen("b", ProcessIdentity("host", 2))
    store.telemetry.worker_seen("a", process)
    workers = {worker.worker_id: worker for worker in store.telemetry.workers()}
    assert workers["a"].started_at == first.started_at
    assert workers["a"].last_seen >= first.last_seen
    store.telemetry.worker_gone("a")
    store.telemetry.worker_gone("nobody")
    assert [worker.worker_id for worker in store.telemetry.workers()] == ["b"]


def test_the_newest_reading_of_every_worker_that_is_there(store: Store) -> None:
    start = datetime(2026, 1, 1, tzinfo=UTC)
    samples = [
        EngineSample(worker, start + timedelta(seconds=second), "job", 1, 0, 1, 8, TokenCounts(tokens, tokens))
        for worker, second, tokens in (("a", 0, 5), ("a", 9, 70), ("b", 4, 30), ("gone", 9, 99))
    ]
    store.telemetry.write_engine_samples(samples)
    for worker in ("a", "b", "idle"):
        store.telemetry.worker_seen(worker, ProcessIdentity("host", 1))
    found = {sample.worker_id: sample for sample in store.telemetry.latest_engine_samples()}
    assert found == {"a": samples[1], "b": samples[2]}


def test_what_ran_is_recorded_once(store: Store) -> None:
    job = add_job(store)
    for _ in range(2):
        store.telemetry.record_model(job.id, "draft", "tiny", "abc", parameters={"layers": 2}, report={})
        store.telemetry.record_model(
            job.id, "target", "big", "def", parameters={"dtype": "bfloat16"}, report={"batch_invariant": True}
        )
        store.telemetry.record_speculator(job.id, "draft_model", "exact", parameters={"max_draft_tokens": 4})
    target, draft = store.telemetry.models(job.id)
    assert (target["role"], target["name"], target["content_hash"]) == ("target", "big", "def")
    assert target["report"] == {"batch_invariant": True}
    assert draft["parameters"] == {"layers": 2}
    [speculator] = store.telemetry.speculators(job.id)
    assert (speculator["method"], speculator["verify"]) == ("draft_model", "exact")
    assert store.telemetry.models("other") == store.telemetry.speculators("other") == []
