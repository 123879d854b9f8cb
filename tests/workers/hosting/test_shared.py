"""One engine for each process: shared, replaced, never starving a chunk that needs another."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.fake_engine import Script
from workers.engine.api.config import EngineConfig
from workers.engine.api.errors import ModelNotFound
from workers.errors import GaveUp
from workers.hosting.shared import EngineHosts

A, B = EngineConfig(target="a"), EngineConfig(target="b")


def never() -> bool:
    return False


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def hosts(script: Script) -> Iterator[EngineHosts]:
    hosts = EngineHosts(script.factory)
    yield hosts
    hosts.close()


def test_chunks_of_one_engine_section_share_the_engine(hosts: EngineHosts, script: Script) -> None:
    with hosts.use(A, never) as first, hosts.use(EngineConfig(target="a"), never) as second:
        assert first is second
    with hosts.use(A, never) as third:
        assert third is first
    assert script.loaded == [A]


def test_another_section_waits_until_the_engine_is_free_and_replaces_it(hosts: EngineHosts, script: Script) -> None:
    order: list[str] = []

    def use_b() -> None:
        with hosts.use(B, never):
            order.append("b")

    with ThreadPoolExecutor() as pool:
        with hosts.use(A, never):
            waiting = pool.submit(use_b)
            order.append("a")
        waiting.result()
    assert order == ["a", "b"]
    assert (script.loaded, script.closed) == ([A, B], [A])


def test_later_chunks_wait_behind_the_one_that_needs_another_engine(hosts: EngineHosts) -> None:
    order: list[str] = []

    def use(config: EngineConfig) -> None:
        with hosts.use(config, never):
            order.append(config.target)

    first = hosts.use(A, never)
    first.__enter__()
    threads = [threading.Thread(target=use, args=(config,)) for config in (B, A)]
    for thread in threads:
        thread.start()
        while len(hosts._line) < threads.index(thread) + 1:
            pass
    first.__exit__(None, None, None)
    for thread in threads:
        thread.join()
    assert order == ["b", "a"]


def test_a_broken_engine_is_replaced_for_the_next_chunk(hosts: EngineHosts, script: Script) -> None:
    with hosts.use(A, never) as host:
        host.failed = True
    assert hosts.running is None
    with hosts.use(A, never) as host:
        assert hosts.running is host
    assert script.loaded == [A, A]


def test_a_failed_load_reaches_whoever_waits_and_is_tried_again(hosts: EngineHosts, script: Script) -> None:
    script.load_error = ModelNotFound("no model 'a'")
    with pytest.raises(ModelNotFound), hosts.use(A, never):
        pass
    script.load_error = None
    with hosts.use(A, never):
        pass
    assert script.loaded == [A]


def test_waiting_for_a_slow_load_can_be_given_up(hosts: EngineHosts, script: Script) -> None:
    script.load_seconds = 0.5
    with pytest.raises(GaveUp), hosts.use(A, lambda: True):
        pass
    with hosts.use(A, never):
        assert script.loaded == [A]


def test_waiting_for_an_engine_in_use_can_be_given_up(hosts: EngineHosts, script: Script) -> None:
    with hosts.use(A, never), pytest.raises(GaveUp), hosts.use(B, lambda: True):
        pass
    assert script.loaded == [A]
