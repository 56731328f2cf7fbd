"""Unix times of spans, when the machine's clock is set."""

from __future__ import annotations

from penstock.service.telemetry.tracing.notes import WallClock

MS = 1_000_000


def test_small_differences_are_no_news() -> None:
    """Spans of one server would otherwise overlap by what it takes to read two clocks."""
    monotonic, unix = 5 * MS, 1000 * MS
    clock = WallClock(lambda: monotonic, lambda: unix)
    assert clock.offset_ns == 995 * MS
    monotonic, unix = 7 * MS, 1002 * MS + 999_999
    assert clock.looked_at() == clock.offset_ns == 995 * MS


def test_a_clock_that_was_set_counts_from_the_next_look_on() -> None:
    monotonic, unix = 5 * MS, 1000 * MS
    clock = WallClock(lambda: monotonic, lambda: unix)
    unix = 400 * MS
    assert clock.offset_ns == 995 * MS
    assert clock.looked_at() == clock.offset_ns == 395 * MS
