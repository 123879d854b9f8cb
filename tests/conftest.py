"""Service discovery for all tests: what runs here, and a corner of it for this session alone."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import psycopg
import pytest
from psycopg import sql

from storage.store.store import Store
from tests.support.services.urls import POSTGRES, RABBITMQ, REDIS, missing

_REDIS_LOCK_SECONDS = 1800

if "PYTEST_XDIST_WORKER" in os.environ:
    # Each process of the suite has a core for itself; set before anything imports torch, and passed on to children.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def _silent(service: str, url: str, error: Exception) -> NoReturn:
    missing(f"no {service} answers at {url}: {error}")


@pytest.fixture(scope="session")
def _postgres_database() -> Iterator[str]:
    """URL of a database that is made for this session and dropped after it."""
    name = f"nightdraft_test_{uuid.uuid4().hex[:12]}"
    try:
        with psycopg.connect(POSTGRES, autocommit=True, connect_timeout=5) as connection:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    except psycopg.OperationalError as error:
        _silent("PostgreSQL", POSTGRES, error)
    head, _, query = POSTGRES.partition("?")
    yield head.rsplit("/", 1)[0] + "/" + name + (f"?{query}" if query else "")
    with psycopg.connect(POSTGRES, autocommit=True) as connection:
        connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


@pytest.fixture
def postgres_url(_postgres_database: str) -> Iterator[str]:
    """URL of an empty PostgreSQL schema of this test's own."""
    with _schema(_postgres_database) as url:
        yield url


@pytest.fixture(scope="session")
def _postgres_store_url(_postgres_database: str) -> Iterator[str]:
    """URL of a schema with a store's tables, set up once, because that takes longer than most tests."""
    with _schema(_postgres_database) as url:
        Store.open(url).dispose()
        yield url


@pytest.fixture(scope="session")
def kernels() -> None:
    """The kernels of the sampler, compiled or loaded. The cache is settled with them: no test's own is taken for it."""
    import torch

    from workers.engine.kernels.cpu.sampling import compile_kernels

    compile_kernels(torch.float32)


@contextmanager
def _schema(database: str) -> Iterator[str]:
    schema = f"t{uuid.uuid4().hex[:12]}"
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE SCHEMA {}").format(sql.Identifier(schema)))
    yield f"{database}{'&' if '?' in database else '?'}options=-csearch_path%3D{schema}"
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(sql.SQL("DROP SCHEMA {} CASCADE").format(sql.Identifier(schema)))


@pytest.fixture(scope="session")
def _redis_database() -> Iterator[str]:
    """URL of a Redis database number that no other session uses meanwhile; emptied before and after."""
    redis = pytest.importorskip("redis")
    with redis.Redis.from_url(f"{REDIS}/0", socket_connect_timeout=5) as server:
        try:
            numbers = int(server.config_get("databases")["databases"])
        except redis.ConnectionError as error:
            _silent("Redis", REDIS, error)
        lock = "nightdraft-test-database-{}"
        free = (n for n in range(1, numbers) if server.set(lock.format(n), "taken", nx=True, ex=_REDIS_LOCK_SECONDS))
        number = next(free, None)
        if number is None:
            pytest.fail(f"all {numbers - 1} databases of {REDIS} are taken by other test sessions")
        with redis.Redis.from_url(f"{REDIS}/{number}") as own:
            own.flushdb()
            yield f"{REDIS}/{number}"
            own.flushdb()
        server.delete(lock.format(number))


@pytest.fixture
def redis_url(_redis_database: str) -> str:
    """URL of a Redis database of this session's own. Use queue names of your own within it."""
    return _redis_database


@pytest.fixture(scope="session")
def rabbitmq_url() -> str:
    """URL of RabbitMQ; shared with other sessions, so use queue names of your own and delete the queues."""
    kombu = pytest.importorskip("kombu")
    try:
        with kombu.Connection(RABBITMQ, connect_timeout=5) as connection:
            connection.ensure_connection(max_retries=1, timeout=5)
    except (OSError, kombu.exceptions.OperationalError) as error:
        _silent("RabbitMQ", RABBITMQ, error)
    return RABBITMQ


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.service)])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of an empty store: once on SQLite, once on PostgreSQL."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'store.db'}"
        return
    url: str = request.getfixturevalue("_postgres_store_url")
    yield url
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SET lock_timeout = '20s'")
        connection.execute("TRUNCATE jobs, workers, engine_samples RESTART IDENTITY CASCADE")


@pytest.fixture
def store(store_url: str) -> Iterator[Store]:
    """An open, empty store: once on SQLite, once on PostgreSQL."""
    with Store.open(store_url) as opened:
        yield opened
