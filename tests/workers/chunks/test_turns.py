"""A chunk under suspicion runs with nobody beside it."""

from __future__ import annotations

import threading

import pytest

from workers.chunks.turns import Company
from workers.errors import GaveUp


def never() -> bool:
    return False


def at_once() -> bool:
    return True


def test_others_share() -> None:
    company = Company()
    with company.enter(alone=False, give_up=never), company.enter(alone=False, give_up=at_once):
        pass


@pytest.mark.parametrize(("first", "second"), [(True, True), (True, False), (False, True)])
def test_one_that_has_to_be_alone_is(first: bool, second: bool) -> None:
    company = Company()
    with (
        company.enter(alone=first, give_up=never),
        pytest.raises(GaveUp),
        company.enter(alone=second, give_up=at_once),
    ):
        pass
    with company.enter(alone=second, give_up=at_once):
        pass


def test_newcomers_wait_behind_the_one_that_has_to_be_alone() -> None:
    company, order = Company(), []
    waiting = threading.Event()

    def enter(name: str, alone: bool) -> None:
        def give_up() -> bool:
            waiting.set()
            return False

        with company.enter(alone=alone, give_up=give_up):
            order.append(name)

    threads = []
    with company.enter(alone=False, give_up=never):
        for name, alone in (("suspect", True), ("newcomer", False)):
            waiting.clear()
            threads.append(threading.Thread(target=enter, args=(name, alone)))
            threads[-1].start()
            assert waiting.wait(10)
    for thread in threads:
        thread.join()
    assert order == ["suspect", "newcomer"]
