from __future__ import annotations

import pytest

from runner.output.rates import Rates, RateWindow, format_duration


def test_nothing_is_claimed_before_something_is_known() -> None:
    window = RateWindow()
    window.add(0.0, rows=50, tokens=500)
    window.add(1.0, rows=60, tokens=600)
    assert window.rates(40).eta_seconds is None


def test_there_is_no_rate_before_the_first_row() -> None:
    window = RateWindow()
    for second in (0.0, 10.0, 20.0):
        window.add(second, rows=24, tokens=480)
    assert window.rates(10) == Rates()
    window.add(30.0, rows=25, tokens=500)
    assert window.rates(9).rows_per_second == pytest.approx(1 / 30)


def test_tokens_are_counted_as_they_come_and_go_on_after_another_engine_began_anew() -> None:
    window = RateWindow()
    for second, tokens in ((0, 0), (2, 100), (4, 200), (6, 0), (8, 100)):
        window.add(float(second), 0, tokens)
    rates = window.rates(rows_left=5)
    assert (rates.rows_per_second, rates.tokens_per_second, rates.eta_seconds) == (None, 300 / 8, None)


def test_a_resumed_job_is_not_credited_with_earlier_rows() -> None:
    window = RateWindow()
    window.add(100.0, rows=500, tokens=5000)
    window.add(110.0, rows=520, tokens=5300)
    rates = window.rates(40)
    assert rates.rows_per_second == pytest.approx(2.0)
    assert rates.tokens_per_second == pytest.approx(30.0)
    assert rates.eta_seconds == pytest.approx(20.0)


def test_rates_follow_the_last_seconds_and_the_eta_a_longer_time() -> None:
    window = RateWindow(rate_seconds=10.0, eta_seconds=40.0)
    for second in range(0, 31, 2):
        window.add(float(second), rows=min(second, 20) * 3, tokens=0)
    rates = window.rates(20)
    assert rates.rows_per_second == 0.0
    assert rates.eta_seconds == pytest.approx(10.0)


def test_a_job_that_stands_still_has_no_eta() -> None:
    window = RateWindow(rate_seconds=10.0, eta_seconds=20.0)
    for second in range(0, 61, 2):
        window.add(float(second), rows=min(second, 20), tokens=0)
    assert window.rates(10).eta_seconds is None


def test_a_restart_forgets_what_came_before() -> None:
    window = RateWindow()
    window.add(0.0, rows=0, tokens=0)
    window.restart()
    assert window.rates(5) == Rates()
    window.add(100.0, rows=0, tokens=0)
    window.add(110.0, rows=10, tokens=50)
    assert window.rates(5).eta_seconds == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "-"), (0.4, "0:00"), (65, "1:05"), (3599.6, "1:00:00"), (3723, "1:02:03")]
)
def test_durations(seconds: float | None, text: str) -> None:
    assert format_duration(seconds) == text
