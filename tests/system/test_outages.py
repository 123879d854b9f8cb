"""Brokers and databases that go away in the middle: the job waits and goes on."""

from __future__ import annotations

import time
from collections.abc import Callable

import psycopg
import pytest

from storage.records import ChunkState, Job, JobState
from tests.system.cluster import Cluster, wait_until
from tests.system.conftest import BrokerServer

pytestmark = pytest.mark.service

PROMPTS = [f"Tell me about number {place}." for place in range(48)]
SLOW = "light:120"

MakeCluster = Callable[[str, str], Cluster]


def test_the_broker_is_killed_and_comes_back(
    make_cluster: MakeCluster, broker_server: BrokerServer, postgres_url: str
) -> None:
    """Redis has forgotten every message by then."""
    with make_cluster(broker_server.url, postgres_url) as cluster:
        job = cluster.submit(PROMPTS, target=SLOW)
        workers = [cluster.start_worker(), cluster.start_worker()]
        with cluster.scheduling(job):
            wait_until(lambda: _in_hand(cluster, job) == 4, "both workers have all that they take at a time")
            broker_server.kill()
            # Longer than a chunk takes: nobody can acknowledge what it has in hand.
            time.sleep(1.5)
            assert _in_hand(cluster, job) == 0
            broker_server.start()
            assert cluster.wait_finished(job).state is JobState.COMPLETED
        assert all(worker.alive for worker in workers)
        assert cluster.export(job) == cluster.undisturbed(job)


def _in_hand(cluster: Cluster, job: Job) -> int:
    return cluster.store.progress(job.id).chunks.get(ChunkState.RUNNING, 0)


def test_postgresql_drops_every_connection_again_and_again(
    make_cluster: MakeCluster, redis_server: BrokerServer, postgres_url: str
) -> None:
    # The oldest connection is the one of the fixture that made the schema.
    terminate = """
        SELECT pg_terminate_backend(pid) FROM pg_stat_activity
        WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_start >
            (SELECT min(backend_start) FROM pg_stat_activity WHERE datname = current_database())
    """
    with make_cluster(redis_server.url, postgres_url) as cluster:
        job = cluster.submit(PROMPTS, target=SLOW)
        cluster.start_worker()
        with cluster.scheduling(job), psycopg.connect(postgres_url, autocommit=True) as connection:
            for count in (1, 16, 32):
                cluster.wait_recorded(job, count)
                connection.execute(terminate)
            assert cluster.wait_finished(job).state is JobState.COMPLETED
        assert cluster.export(job) == cluster.undisturbed(job)
