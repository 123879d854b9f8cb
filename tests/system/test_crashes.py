"""Workers that die, hang and come back: every row has exactly one record, the same as if nothing had happened."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from scheduler.daemon.publisher import CeleryPublisher
from storage.records import ChunkMessage, JobState
from tests.support.cluster.cluster import Cluster
from tests.support.services.brokers import BrokerServer
from tests.support.waiting import wait_until

pytestmark = pytest.mark.service

PROMPTS = [f"Tell me about number {place}." for place in range(48)]
SLOW = "light:120"
"""Milliseconds for an answer: fast enough for a test, slow enough to be interrupted."""

MakeCluster = Callable[[str, str], Cluster]


def kill_one_of_two(cluster: Cluster, **spec: Any) -> None:
    """Kill a busy worker in the middle of a job; the job completes as if nothing had happened."""
    job = cluster.submit(PROMPTS, keep_token_ids=True, **spec)
    doomed, _ = cluster.start_worker(), cluster.start_worker()
    with cluster.scheduling(job):
        wait_until(lambda: cluster.recorded(job) >= 8 and cluster.holds_chunk(doomed), "the worker is busy")
        doomed.kill()
        assert cluster.recorded(job) < len(PROMPTS)
        assert cluster.wait_finished(job).state is JobState.COMPLETED
    assert any(chunk.attempts for chunk in cluster.store.chunks.of_job(job.id))
    assert cluster.export(job) == cluster.undisturbed(job)


def test_kill_nine_in_the_middle(make_cluster: MakeCluster, broker_server: BrokerServer, postgres_url: str) -> None:
    with make_cluster(broker_server.url, postgres_url) as cluster:
        kill_one_of_two(cluster, target=SLOW)


def test_kill_nine_in_the_middle_of_speculative_decoding(
    make_cluster: MakeCluster, redis_server: BrokerServer, postgres_url: str
) -> None:
    engine = {"speculation": {"method": "ngram", "policy": "fixed"}}
    with make_cluster(redis_server.url, postgres_url) as cluster:
        kill_one_of_two(cluster, target="scripted:delay_ms=20,order=2", engine=engine, lease_seconds=6.0)


class StutteringPublisher(CeleryPublisher):
    """Delivers everything three times."""

    def publish(self, message: ChunkMessage) -> None:
        for _ in range(3):
            super().publish(message)


def test_every_message_delivered_three_times(
    make_cluster: MakeCluster, broker_server: BrokerServer, postgres_url: str
) -> None:
    with make_cluster(broker_server.url, postgres_url) as cluster:
        job = cluster.submit(PROMPTS, target="light:10")
        workers = [cluster.start_worker(), cluster.start_worker()]
        with cluster.scheduling(job, StutteringPublisher(broker_server.url)):
            assert cluster.wait_finished(job).state is JobState.COMPLETED
        assert not any("Connection to broker lost" in worker.output() for worker in workers)
        assert {chunk.epoch for chunk in cluster.store.chunks.of_job(job.id)} == {1}
        assert cluster.export(job) == cluster.undisturbed(job)


def test_a_zombie_that_wakes_up_past_its_lease_writes_nothing(
    make_cluster: MakeCluster, redis_server: BrokerServer, postgres_url: str
) -> None:
    with make_cluster(redis_server.url, impatient(postgres_url)) as cluster:
        job = cluster.submit(PROMPTS, target=SLOW)
        zombie, healthy = cluster.start_worker(), cluster.start_worker()
        with cluster.scheduling(job):
            wait_until(lambda: cluster.holds_chunk(zombie) and cluster.holds_chunk(healthy), "both workers are busy")
            zombie.send(signal.SIGSTOP)
            assert cluster.wait_finished(job).state is JobState.COMPLETED
            before = {(r.row_index, r.sample): r for r in cluster.store.results.iterate(job.id)}
            zombie.send(signal.SIGCONT)
            wait_until(lambda: ": lost, " in zombie.output(), "the zombie notices")
            assert {(r.row_index, r.sample): r for r in cluster.store.results.iterate(job.id)} == before
            healthy.kill()
            more = cluster.submit(PROMPTS[:8], target="light:1", name="more")
            assert cluster.wait_finished(more).state is JobState.COMPLETED
        assert cluster.export(job) == cluster.undisturbed(job)


@pytest.mark.parametrize("place", ["claim", "heartbeat", "copy"])
def test_a_worker_that_freezes_inside_a_transaction_holds_nobody_up(
    make_cluster: MakeCluster, redis_server: BrokerServer, postgres_url: str, place: str
) -> None:
    """Its session ends by itself, and the locks that all the others wait for with it; "claim" under our own limits."""
    with make_cluster(redis_server.url, postgres_url if place == "claim" else impatient(postgres_url)) as cluster:
        job = cluster.submit(PROMPTS[:16], target="light:300")
        other = cluster.submit(PROMPTS[:8], target="light:1", name="other")
        frozen = cluster.start_worker(freeze=place)
        with cluster.scheduling(job):
            wait_until(lambda: frozen.stopped, "the worker freezes")
            started = time.monotonic()
            cluster.start_worker()
            cluster.store.jobs.cancel(other.id)
            assert cluster.wait_finished(other).state is JobState.CANCELLED
            assert cluster.wait_finished(job).state is JobState.COMPLETED
            assert time.monotonic() - started < 45
            before = list(cluster.store.results.iterate(job.id))
            frozen.send(signal.SIGCONT)
            more = cluster.submit(PROMPTS[:8], target="light:1", name="more")
            assert cluster.wait_finished(more).state is JobState.COMPLETED
            assert list(cluster.store.results.iterate(job.id)) == before
        assert frozen.alive
        assert cluster.export(job) == cluster.undisturbed(job)


def impatient(postgres_url: str) -> str:
    """The store's URL with limits as short as the leases of these tests."""
    return f"{postgres_url}%20-cidle_in_transaction_session_timeout%3D1s%20-clock_timeout%3D500ms"


def test_sigterm_exits_in_time_and_loses_nothing(
    make_cluster: MakeCluster, broker_server: BrokerServer, postgres_url: str
) -> None:
    with make_cluster(broker_server.url, postgres_url) as cluster:
        job = cluster.submit(PROMPTS, target=SLOW, lease_seconds=60.0)
        first = cluster.start_worker()
        with cluster.scheduling(job):
            cluster.wait_recorded(job, 8)
            first.send(signal.SIGTERM)
            assert first.process.wait(timeout=10) == 0
            chunks = cluster.store.chunks.of_job(job.id)
            assert not any(chunk.worker_id for chunk in chunks if chunk.lease_until is not None)
            assert not any(chunk.attempts for chunk in chunks)
            assert 8 <= cluster.recorded(job) < len(PROMPTS)
            assert cluster.store.telemetry.workers() == []
            cluster.start_worker()
            assert cluster.wait_finished(job).state is JobState.COMPLETED
        assert cluster.export(job) == cluster.undisturbed(job)


def test_a_poison_row_is_isolated_and_recorded(
    make_cluster: MakeCluster, redis_server: BrokerServer, postgres_url: str
) -> None:
    prompts = [f"harmless {place}" for place in range(16)]
    prompts[6] = "this is POISON"
    with make_cluster(redis_server.url, postgres_url) as cluster:
        job = cluster.submit(prompts, target="light:20:POISON", chunk_rows=4, max_attempts=1, lease_seconds=1.0)
        with cluster.scheduling(job):

            def job_ended() -> bool:
                if not any(worker.alive for worker in cluster.workers):
                    cluster.start_worker()
                return cluster.store.jobs.get(job.id).state.terminal

            wait_until(job_ended, "the job ends")
        assert cluster.store.jobs.get(job.id).state is JobState.COMPLETED
        (error,) = cluster.store.results.errors(job.id)
        assert (error.row_index, error.error_code) == (6, "worker_crashed")
        assert cluster.recorded(job) == len(prompts)


def test_cancel_keeps_what_finished_and_resume_does_the_rest(
    make_cluster: MakeCluster, redis_server: BrokerServer, postgres_url: str
) -> None:
    with make_cluster(redis_server.url, postgres_url) as cluster:
        job = cluster.submit(PROMPTS, target=SLOW)
        worker = cluster.start_worker()
        with cluster.scheduling(job):
            cluster.wait_recorded(job, 8)
            cluster.store.jobs.cancel(job.id)
            assert cluster.wait_finished(job).state is JobState.CANCELLED
            kept = list(cluster.store.results.iterate(job.id))
            assert 8 <= len(kept) < len(PROMPTS)
            cluster.store.jobs.resume(job.id)
            assert cluster.wait_finished(job).state is JobState.COMPLETED
        assert worker.alive
        now = {result.row_index: result for result in cluster.store.results.iterate(job.id)}
        assert [now[result.row_index] for result in kept] == kept
        assert cluster.export(job) == cluster.undisturbed(job)
