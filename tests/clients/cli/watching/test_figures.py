"""Numbers as a screen shows them."""

from __future__ import annotations

import pytest

from penstock.cli.watching import figures


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        (0, "0"),
        (0.04, "0.0"),
        (0.44, "0.4"),
        (3, "3"),
        (9.94, "9.9"),
        (9.96, "10"),
        (61.4, "61"),
        (9_999, "9,999"),
        (9_999.6, "10k"),
        (12_345, "12.3k"),
        (99_949, "99.9k"),
        (99_951, "100k"),
        (999_499, "999k"),
        (999_500, "1M"),
        (4_560_000, "4.56M"),
        (18_446_744_073_709_551_615, "18446744074G"),
    ],
)
def test_count(value: float | None, shown: str) -> None:
    assert figures.count(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        (0.0, "0 ms"),
        (0.00042, "0.42 ms"),
        (0.0625, "62.5 ms"),
        (0.25, "250 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1 s"),
        (1.5, "1.5 s"),
        (12.34, "12.3 s"),
        (99.4, "99.4 s"),
        (99.6, "1 m 40 s"),
        (4_000, "1 h 06 m"),
    ],
)
def test_seconds(value: float | None, shown: str) -> None:
    assert figures.seconds(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (-3, "0 s"),
        (0.4, "0 s"),
        (59.4, "59 s"),
        (60, "1 m 00 s"),
        (3_599.6, "1 h 00 m"),
        (86_399, "23 h 59 m"),
        (273_600, "3 d 04 h"),
    ],
)
def test_age(value: float, shown: str) -> None:
    assert figures.age(value) == shown


def test_share() -> None:
    assert [figures.share(value) for value in (None, 0.0, 0.125, 1.0)] == ["-", "0 %", "12 %", "100 %"]
