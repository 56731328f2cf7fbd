"""Rates and percentiles of the last minute, compared with numbers by hand and with a plain list of values."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.measuring.recent import Distribution, RecentTotals, RecentValues

S = 10**9
START = 1_000 * S
"""The moment at which the tests begin, in monotonic ns."""


def exact(values: list[float], percent: int) -> float:
    """Return the least of the values that `percent` of them are at most as large as."""
    return sorted(values)[math.ceil(len(values) * percent / 100) - 1]


def test_no_values() -> None:
    assert RecentValues().distribution(START, 60) == Distribution(0, 0.0, 0.0, 0.0, 0.0)


def test_percentiles_by_hand() -> None:
    """Of 1 to 100: half are at most 50, nine tenths at most 90. Within 5 %."""
    recent = RecentValues()
    for i in range(1, 101):
        recent.add(START, float(i))
    found = recent.distribution(START + S, 60)
    assert found.count == 100
    assert found.mean == pytest.approx(50.5)
    assert found.p50 == pytest.approx(50, rel=0.05)
    assert found.p90 == pytest.approx(90, rel=0.05)
    assert found.p99 == pytest.approx(99, rel=0.05)


def test_a_single_value_is_told_exactly() -> None:
    recent = RecentValues()
    recent.add(START, 0.125, times=7)
    assert recent.distribution(START, 60) == Distribution(7, 0.125, 0.125, 0.125, 0.125)


def test_zero_is_a_value() -> None:
    recent = RecentValues()
    recent.add(START, 0.0, times=2)
    found = recent.distribution(START, 60)
    assert found.count == 2
    assert found.p99 == pytest.approx(0.0, abs=1e-8)


@given(st.lists(st.tuples(st.floats(1e-6, 1e4), st.integers(1, 20)), min_size=1))
def test_percentiles_are_within_five_percent(values: list[tuple[float, int]]) -> None:
    recent = RecentValues()
    for i, (value, times) in enumerate(values):
        recent.add(START + i * S // 2 if i < 100 else START, value, times)
    plain = [value for value, times in values for _ in range(times)]
    found = recent.distribution(START + 50 * S, 60)
    assert found.count == len(plain)
    assert found.mean == pytest.approx(sum(plain) / len(plain))
    for percent, told in ((50, found.p50), (90, found.p90), (99, found.p99)):
        assert told == pytest.approx(exact(plain, percent), rel=0.05)
    assert found.p50 <= found.p90 <= found.p99


def test_values_are_forgotten_after_the_span_and_after_a_minute() -> None:
    recent = RecentValues()
    recent.add(START, 1.0)
    recent.add(START + 30 * S, 2.0)
    now = START + 35 * S
    assert recent.distribution(now, 60).count == 2
    assert recent.distribution(now, 10) == Distribution(1, 2.0, 2.0, 2.0, 2.0)
    assert recent.distribution(now, 4).count == 0
    recent.add(START + 100 * S, 3.0)
    assert recent.distribution(START + 100 * S, 60).count == 1
    recent.add(START, 9.0)  # so long ago that there is no place for it
    assert recent.distribution(START + 100 * S, 60).count == 1
    assert recent.distribution(START + 10_000 * S, 60) == Distribution()


def test_totals_by_hand() -> None:
    """20 of one and 1 of the other in each tenth of a second for 30 seconds, then nothing."""
    recent = RecentTotals(START, (0, 0), span_s=10)
    for i in range(1, 301):
        recent.see(START + i * S // 10, (20 * i, i))
    end = START + 30 * S
    assert recent.grown(end) == ((2000, 100), 10)
    assert recent.grown(end + 5 * S) == ((1000, 50), 10)
    assert recent.grown(end + 10 * S) == ((0, 0), 10)
    assert recent.grown(end + 1000 * S) == ((0, 0), 10)


def test_totals_since_the_start() -> None:
    recent = RecentTotals(START, (7,), span_s=10)
    assert recent.grown(START + S // 100) == ((0,), 1)
    recent.see(START + S // 100, (12,))
    assert recent.grown(START + S // 100) == ((5,), 1), "5 in a second, not 500"
    assert recent.grown(START + 4 * S) == ((5,), 4)


def test_totals_after_a_long_silence() -> None:
    recent = RecentTotals(START, (0,), span_s=10)
    recent.see(START + S, (100,))
    recent.see(START + 500 * S, (130,))
    assert recent.grown(START + 501 * S) == ((30,), 10)


@given(
    st.lists(st.tuples(st.integers(0, 60 * S), st.integers(0, 100)), max_size=60).map(sorted),
    st.integers(60, 80),
)
def test_totals_have_grown_by_what_was_added(added: list[tuple[int, int]], now_s: int) -> None:
    """Moments that are closer than 50 ms may count as one."""
    recent, total = RecentTotals(START, (0,), span_s=10), 0
    for at_ns, amount in added:
        total += amount
        recent.see(START + at_ns, (total,))
    begin = (now_s - 10) * S
    (found,), seconds = recent.grown(START + now_s * S)
    assert seconds == 10
    assert sum(amount for at_ns, amount in added if at_ns > begin + S // 20) <= found
    assert found <= sum(amount for at_ns, amount in added if at_ns > begin - S // 20)


def test_totals_of_many_moments_take_bounded_memory() -> None:
    recent = RecentTotals(START, (0,), span_s=10)
    for i in range(100_000):
        recent.see(START + i * S // 1000, (i,))
    assert len(recent._seen) < 250
    (found,), _ = recent.grown(START + 100 * S)
    assert found == pytest.approx(10_000, rel=0.01)
