"""First come, first served."""

from __future__ import annotations

import threading
import time

import pytest

from workers.errors import GaveUp
from workers.line import Line


def test_those_behind_the_first_wait_even_if_there_is_something_for_them() -> None:
    line, free, got = Line(), set[str](), []

    def take(name: str) -> str | None:
        return name if name in free else None

    def wait_for(name: str) -> None:
        got.append(line.wait(lambda: take(name), lambda: False, "no place"))

    threads = []
    for number, name in enumerate("abc"):
        threads.append(threading.Thread(target=wait_for, args=(name,), daemon=True))
        threads[-1].start()
        while len(line) <= number:
            time.sleep(0.01)
    with line.changing():
        free.update("bc")
    assert got == []
    with line.changing():
        free.add("a")
    for thread in threads:
        thread.join()
    assert got == ["a", "b", "c"]


def test_who_gives_up_leaves_the_line() -> None:
    line = Line()
    with pytest.raises(GaveUp, match="no place"):
        line.wait(lambda: None, lambda: True, "no place")
    assert line.wait(lambda: 0, lambda: True, "no place") == 0, "what is there is taken"
