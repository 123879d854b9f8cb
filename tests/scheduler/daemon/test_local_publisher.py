from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from scheduler.daemon.local_publisher import LocalPublisher
from storage.records import ChunkMessage

HINTS = [ChunkMessage("job", number, 0) for number in range(4)]


class Gate:
    """Takes messages one after another; each is held until the gate opens."""

    def __init__(self) -> None:
        self.taken: list[ChunkMessage] = []
        self.one_taken = threading.Semaphore(0)
        self.open = threading.Event()

    def __call__(self, message: ChunkMessage) -> None:
        self.taken.append(message)
        self.one_taken.release()
        self.open.wait()


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open.set()


def test_messages_are_taken_oldest_first_and_all_of_them(gate: Gate) -> None:
    publisher = LocalPublisher(gate, 1)
    for hint in HINTS:
        publisher.publish(hint)
    gate.open.set()
    for _ in HINTS:
        assert gate.one_taken.acquire(timeout=10)
    publisher.join()
    assert gate.taken == HINTS


def test_a_message_that_waits_is_not_queued_twice(gate: Gate) -> None:
    publisher = LocalPublisher(gate, 1)
    publisher.publish(HINTS[0])
    assert gate.one_taken.acquire(timeout=10)
    for hint in (HINTS[1], HINTS[1], HINTS[2]):
        publisher.publish(hint)
    assert publisher.waiting() == 2


def test_closed_it_drops_what_waits_and_ends_what_is_in_hand(gate: Gate) -> None:
    publisher = LocalPublisher(gate, 2)
    for hint in HINTS:
        publisher.publish(hint)
    for _ in range(2):
        assert gate.one_taken.acquire(timeout=10)
    publisher.close()
    publisher.publish(HINTS[0])
    assert publisher.waiting() == 0
    ending = threading.Thread(target=publisher.join)
    ending.start()
    gate.open.set()
    ending.join(10)
    assert not ending.is_alive()
    assert len(gate.taken) == 2


def test_one_that_was_never_used_has_no_threads(gate: Gate) -> None:
    before = threading.active_count()
    publisher = LocalPublisher(gate, 3)
    assert threading.active_count() == before
    publisher.join()
