"""A chunk under suspicion runs with nobody beside it."""

from __future__ import annotations

import threading

import pytest

from workers.chunks.turns import Turns
from workers.errors import GaveUp


def never() -> bool:
    return False


def at_once() -> bool:
    return True


def test_others_share() -> None:
    turns = Turns()
    with turns.enter(alone=False, give_up=never), turns.enter(alone=False, give_up=at_once):
        pass


@pytest.mark.parametrize(("first", "second"), [(True, True), (True, False), (False, True)])
def test_one_that_has_to_be_alone_is(first: bool, second: bool) -> None:
    turns = Turns()
    with (
        turns.enter(alone=first, give_up=never),
        pytest.raises(GaveUp),
        turns.enter(alone=second, give_up=at_once),
    ):
        pass
    with turns.enter(alone=second, give_up=at_once):
        pass


def test_newcomers_wait_behind_the_one_that_has_to_be_alone() -> None:
    turns, order = Turns(), []
    waiting = threading.Event()

    def enter(name: str, alone: bool) -> None:
        def give_up() -> bool:
            waiting.set()
            return False

        with turns.enter(alone=alone, give_up=give_up):
            order.append(name)

    threads = []
    with turns.enter(alone=False, give_up=never):
        for name, alone in (("suspect", True), ("newcomer", False)):
            waiting.clear()
            threads.append(threading.Thread(target=enter, args=(name, alone)))
            threads[-1].start()
            assert waiting.wait(10)
    for thread in threads:
        thread.join()
    assert order == ["suspect", "newcomer"]
