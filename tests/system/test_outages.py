"""Brokers and databases that go away in the middle: the job waits and goes on."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from sqlalchemy.engine import make_url

from storage.records import ChunkState, Job, JobState
from tests.support.cluster.cluster import Cluster
from tests.support.services.brokers import BrokerServer
from tests.support.services.urls import POSTGRES
from tests.support.waiting import wait_until

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
        cluster.workers_ready(2)
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
    return cluster.store.jobs.progress(job.id).chunks.get(ChunkState.RUNNING, 0)


def test_postgresql_is_read_only_for_a_while(
    make_cluster: MakeCluster, redis_server: BrokerServer, postgres_url: str
) -> None:
    """As in a failover: every session ends, and the new ones can only read. Those must not outlive the phase."""
    with make_cluster(redis_server.url, postgres_url) as cluster, sessions_of(postgres_url) as sessions:
        job = cluster.submit(PROMPTS, target=SLOW, lease_seconds=20.0)
        worker = cluster.start_worker()
        with cluster.scheduling(job):
            cluster.wait_recorded(job, 8)
            sessions.alter("SET default_transaction_read_only = on")
            time.sleep(3)
            assert "read-only transaction" in worker.output()
            recorded = cluster.recorded(job)
            assert recorded < len(PROMPTS)
            sessions.alter("RESET default_transaction_read_only", drop=False)
            assert cluster.wait_finished(job).state is JobState.COMPLETED
        assert not any(chunk.attempts for chunk in cluster.store.chunks.of_job(job.id)), "no chunk was lost"
        assert cluster.export(job) == cluster.undisturbed(job)


def test_services_that_start_while_database_and_broker_refuse_wait_for_them(
    make_cluster: MakeCluster, redis_server: BrokerServer, postgres_url: str, tmp_path: Path
) -> None:
    with make_cluster(redis_server.url, postgres_url) as cluster, sessions_of(postgres_url) as sessions:
        job = cluster.submit(PROMPTS[:8], target="light:1")
        cluster.store.dispose()
        sessions.alter("ALLOW_CONNECTIONS false")
        redis_server.kill()
        worker = cluster.start_worker()
        with scheduler_process(redis_server.url, postgres_url, tmp_path / "scheduler.log") as scheduler:
            logs = (worker.log, tmp_path / "scheduler.log")
            wait_until(lambda: all("does not answer" in log.read_text() for log in logs), "both find the store away")
            redis_server.start()
            sessions.alter("ALLOW_CONNECTIONS true")
            assert cluster.wait_finished(job).state is JobState.COMPLETED
            assert worker.alive
            assert scheduler.poll() is None


@contextmanager
def scheduler_process(broker: str, store: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`nightdraft scheduler`, which must end with 0 when told to."""
    command = [sys.executable, "-c", "from runner.cli import main; main()"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "scheduler", "--store", store, "--broker", broker], stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield process
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


class Sessions:
    """What an administrator does to the database of the test."""

    def __init__(self, connection: psycopg.Connection[Any], name: str) -> None:
        self._connection = connection
        self._name = name

    def alter(self, change: str, *, drop: bool = True) -> None:
        """ALTER DATABASE; `drop`: and end every session on it, since only new ones see the change."""
        database = sql.Identifier(self._name)
        self._connection.execute(sql.SQL("ALTER DATABASE {} {}").format(database, sql.SQL(change)))
        if drop:
            self._connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (self._name,)
            )


@contextmanager
def sessions_of(postgres_url: str) -> Iterator[Sessions]:
    """Puts the database back as it was."""
    name = str(make_url(postgres_url).database)
    with psycopg.connect(POSTGRES, autocommit=True) as connection:
        try:
            yield Sessions(connection, name)
        finally:
            database = sql.Identifier(name)
            for change in ("ALLOW_CONNECTIONS true", "RESET default_transaction_read_only"):
                connection.execute(sql.SQL("ALTER DATABASE {} {}").format(database, sql.SQL(change)))


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
