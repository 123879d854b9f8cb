"""The bridge between task threads and the engine's own thread."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing
from itertools import islice

import pytest

from tests.support.fake_engine import Script
from workers.engine.api.config import EngineConfig
from workers.engine.api.errors import ModelNotFound
from workers.engine.api.request import Completion, Request
from workers.errors import EngineFailed
from workers.hosting.host import EngineHost

CONFIG = EngineConfig(target="fake", max_batch=2)


def requests(*texts: str) -> list[Request]:
    return [Request(id=place, prompt_token_ids=list(text.encode())) for place, text in enumerate(texts)]


def generate(host: EngineHost, requests: Iterable[Request]) -> Iterator[Completion]:
    """Completions in finishing order, the session kept full; closing the generator aborts what runs."""
    source = iter(requests)
    with closing(host.session()) as session:
        while True:
            if session.room >= session.refill and (batch := list(islice(source, session.room))):
                session.send(batch)
            if not session.in_flight:
                return
            yield from session.receive()


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def host(script: Script) -> Iterator[EngineHost]:
    host = EngineHost(CONFIG, factory=script.factory)
    host.start()
    yield host
    host.stop()


def test_every_request_is_answered(host: EngineHost) -> None:
    texts = [f"text {place}" for place in range(100)]
    answers = {c.request_id: c.text for c in generate(host, requests(*texts))}
    assert answers == {place: text.upper() for place, text in enumerate(texts)}


def test_no_more_than_ahead_are_in_flight_and_the_source_is_read_as_needed(host: EngineHost, script: Script) -> None:
    taken: list[int] = []

    def source() -> Iterator[Request]:
        for request in requests(*["text"] * 100):
            taken.append(1)
            yield request

    completions = generate(host, source())
    next(completions)
    assert len(taken) <= host.ahead + 1
    assert len(list(completions)) == 99
    assert script.most_in_flight <= host.ahead == 4


def test_closing_the_generator_aborts_what_is_in_flight(host: EngineHost, script: Script) -> None:
    completions = generate(host, requests("quick", "HOLD", "HOLD"))
    assert next(completions).text == "QUICK"
    completions.close()  # type: ignore[attr-defined]
    assert sorted(map(str, script.aborted)) == ["1", "2"]
    assert [c.text for c in generate(host, requests("after"))] == ["AFTER"]


def test_a_broken_engine_is_reported_and_marked(host: EngineHost) -> None:
    with pytest.raises(EngineFailed, match="the device is gone"):
        list(generate(host, requests("ok", "FAIL")))
    assert host.failed


def test_what_was_answered_before_the_failure_is_not_lost(host: EngineHost) -> None:
    session = host.session()
    session.send(requests("one", "two", "FAIL"))
    received = []
    while len(received) < 2:
        received += session.receive(5)
    with pytest.raises(EngineFailed):
        session.receive(5)
    assert sorted(c.text for c in received) == ["ONE", "TWO"]


def test_receive_gives_up_after_its_timeout(host: EngineHost) -> None:
    with closing(host.session()) as session:
        session.send(requests("HOLD"))
        assert session.receive(0.01) == []
        assert session.in_flight == 1


def test_a_load_that_fails_raises_its_own_error() -> None:
    host = EngineHost(CONFIG, factory=Script(load_error=ModelNotFound("no model 'fake'")).factory)
    with pytest.raises(ModelNotFound, match="no model 'fake'"):
        host.start()


def test_a_stopped_host_refuses_work(script: Script) -> None:
    host = EngineHost(CONFIG, factory=script.factory)
    host.start()
    session = host.session()
    host.stop()
    assert script.closed == [CONFIG]
    with pytest.raises(EngineFailed):
        session.send(requests("late"))
