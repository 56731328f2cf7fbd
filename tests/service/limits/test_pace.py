"""Measuring how fast work gets done, with a clock that the test moves."""

from __future__ import annotations

import pytest

from penstock.service.limits.admission import MAX_RETRY_S, MIN_RETRY_S, UNKNOWN_S, WINDOW_S, Pace
from tests.support.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


def busy(clock: Clock, *, active: int, per_second: float, seconds: int) -> Pace:
    """Return a pace at which this many were under way all the time, and this many ended each second,
    evenly.
    """
    pace = Pace(clock)
    pace.entered(active)
    for _ in range(round(seconds * per_second)):
        clock.now += 1 / per_second
        pace.left()
        pace.entered()
    return pace


def test_nothing_is_known_before_anything_ended(clock: Clock) -> None:
    pace = Pace(clock)
    pace.entered(5)
    clock.now += 100
    assert pace.per_second() is None
    assert pace.retry_after_s() == UNKNOWN_S


@pytest.mark.parametrize("per_second", [0.5, 1, 8, 200])
def test_the_measured_pace(clock: Clock, per_second: float) -> None:
    pace = busy(clock, active=4, per_second=per_second, seconds=120)
    measured = pace.per_second()
    assert measured is not None
    assert measured == pytest.approx(per_second, rel=0.05)
    assert pace.active == 4


def test_a_short_time_is_taken_for_a_second(clock: Clock) -> None:
    """Otherwise the first request, if it ended at once, would promise thousands a second."""
    pace = Pace(clock)
    pace.entered(2)
    clock.now += 0.001
    pace.left()
    assert pace.per_second() == pytest.approx(1, rel=0.01)


def test_idle_time_does_not_count(clock: Clock) -> None:
    pace = busy(clock, active=1, per_second=10, seconds=60)
    pace.left()
    before = pace.per_second()
    clock.now += 8 * 3600
    assert pace.per_second() == before
    pace.entered()
    assert pace.per_second() == before


def test_a_stall_slows_the_pace_down(clock: Clock) -> None:
    pace = busy(clock, active=3, per_second=10, seconds=60)
    clock.now += 2 * WINDOW_S
    slower = pace.per_second()
    assert slower is not None
    assert slower < 2
    clock.now += 20 * WINDOW_S
    assert pace.retry_after_s() == MAX_RETRY_S


def test_the_newest_time_counts_most(clock: Clock) -> None:
    pace = busy(clock, active=1, per_second=100, seconds=60)
    for _ in range(150):
        clock.now += 1.0
        pace.left()
        pace.entered()
    measured = pace.per_second()
    assert measured is not None
    assert 0.9 < measured < 2.5


def test_callers_refused_together_are_sent_away_one_after_the_other(clock: Clock) -> None:
    pace = busy(clock, active=20, per_second=4, seconds=200)
    times = [pace.retry_after_s() for _ in range(5)]
    assert times == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.25], rel=0.05)
    clock.now += 0.5  # two of them have places now
    assert pace.retry_after_s() == pytest.approx(1.0, rel=0.1)
    for _ in range(40):
        clock.now += 0.25
        pace.left()
        pace.entered()
    assert pace.retry_after_s() == pytest.approx(0.25, rel=0.05), "old promises are forgotten"


def test_many_places_take_longer(clock: Clock) -> None:
    pace = busy(clock, active=20, per_second=4, seconds=200)
    assert pace.retry_after_s(8) == pytest.approx(2.0, rel=0.05)


def test_nobody_is_sent_away_for_longer_than_all_that_runs_takes(clock: Clock) -> None:
    """However many calls are refused, and whoever made them."""
    pace = busy(clock, active=20, per_second=4, seconds=200)
    for _ in range(1000):
        last = pace.retry_after_s()
    assert last == pytest.approx(20 / 4, rel=0.05)


def test_the_time_is_within_bounds(clock: Clock) -> None:
    fast = busy(clock, active=2, per_second=1000, seconds=10)
    assert fast.retry_after_s() == MIN_RETRY_S
    slow = busy(clock, active=1000, per_second=0.05, seconds=200)
    assert slow.retry_after_s(100) == MAX_RETRY_S
