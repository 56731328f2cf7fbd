"""The curves of the last minutes, from reports at known times."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta

from penstock.cli.watching.curves import bar, curve
from penstock.cli.watching.history import SPAN_S, History
from penstock.client import LoadReport
from tests.clients.watching import REPORT

MIDNIGHT = datetime(2026, 1, 2, tzinfo=UTC)


def report(at_s: float, generated: int = 0, running: int = 0, *, started_s: float = -100.0) -> LoadReport:
    assert REPORT.totals is not None
    totals = dataclasses.replace(
        REPORT.totals, generated_tokens=generated, since=MIDNIGHT + timedelta(seconds=started_s)
    )
    load = dataclasses.replace(REPORT.load, running_requests=running)
    return dataclasses.replace(REPORT, at=MIDNIGHT + timedelta(seconds=at_s), totals=totals, load=load)


def history_of(*reports: LoadReport) -> History:
    history = History()
    for each in reports:
        history.add(each)
    return history


def rates(history: History, columns: int = 180) -> list[float | None]:
    return list(history.curve(lambda point: point.generated_per_s, columns))


def test_rates_are_those_between_two_reports() -> None:
    history = history_of(report(0, 100), report(1, 150), report(3, 150), report(4, 400))
    assert rates(history)[-5:] == [None, 50.0, None, 0.0, 250.0]


def test_a_server_that_started_again_has_no_rate_until_its_second_report() -> None:
    """Also where it has counted more since than before."""
    history = history_of(
        report(0, 100),
        report(1, 200),
        report(2, 900, started_s=1.5),
        report(3, 950, started_s=1.5),
        report(4, 10, started_s=1.5),
    )
    assert rates(history)[-5:] == [None, 100.0, None, 50.0, None]


def test_a_server_without_metrics_has_no_rates() -> None:
    bare = dataclasses.replace(report(1), totals=None)
    assert rates(history_of(report(0), bare, report(2)))[-3:] == [None, None, None]


def test_a_part_has_the_mean_of_its_reports() -> None:
    """60 parts of 3 s each, which begin at multiples of 3 s."""
    history = history_of(*(report(at_s, running=at_s) for at_s in range(8)))
    shown = history.curve(lambda point: float(point.running), 60)
    assert shown[-4:] == [None, 1.0, 4.0, 6.5]
    moved = history_of(*(report(at_s, running=at_s) for at_s in range(9)))
    assert moved.curve(lambda point: float(point.running), 60)[-4:] == [None, 1.0, 4.0, 7.0]


def test_what_is_older_than_the_span_is_forgotten() -> None:
    history = history_of(report(0, running=9), report(SPAN_S + 1, running=1))
    assert history.curve(lambda point: float(point.running), 1) == [1.0]
    assert history.curve(lambda point: float(point.running), 0) == []


def test_a_clock_that_was_set_back() -> None:
    history = history_of(report(100, 100), report(50, 200), report(51, 260))
    assert rates(history)[-3:] == [None, None, 60.0]


def test_nothing_yet() -> None:
    assert rates(History(), 5) == []


def test_a_curve_of_characters() -> None:
    assert curve([0, 1, 3.5, 7, None, 7]) == "▁▂▅█ █"
    assert curve([0, 1, 3.5, 7, None, 7], ascii_only=True) == "_.+# #"
    assert curve([1, 2], most=4) == "▃▅"
    assert curve([5], most=4) == "█"
    assert curve([0, 0, None]) == "▁▁ "
    assert curve([]) == ""


def test_a_bar() -> None:
    assert bar([(0.5, "red"), (0.25, "blue")], 8).plain == "██████░░"
    assert bar([(0.5, ""), (0.25, "")], 8, ascii_only=True).plain == "######.."
    # what is not empty is seen, and what is too much does not overflow
    assert bar([(0.001, "red"), (0.001, "blue")], 8).plain == "██░░░░░░"
    assert bar([(1.0, "red"), (0.5, "blue")], 8).plain == "████████"
    assert bar([(0.5, "red")], 0).plain == ""
