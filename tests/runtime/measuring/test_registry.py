"""The registry: what is counted, how it is bounded, and what a snapshot shows."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.measuring.instruments import Instrument, Kind
from penstock.runtime.measuring.registry import MOST_LABEL_SETS, OTHER, Registry
from penstock.runtime.measuring.snapshot import Exemplar, HistogramPoint, Labels

SENT = Instrument("test.sent", Kind.COUNTER, "{thing}", "Things that were sent.", ("color",))
TOTAL = Instrument("test.total", Kind.COUNTER, "{thing}", "All things.")
LEVEL = Instrument("test.level", Kind.GAUGE, "1", "How full it is.", ("side",))
TIMES = Instrument("test.times", Kind.HISTOGRAM, "s", "How long it took.", (), (0.1, 1.0, 10.0))


def points(registry: Registry, instrument: Instrument) -> dict[Labels, float | HistogramPoint]:
    (metric,) = [m for m in registry.snapshot().metrics if m.instrument is instrument]
    return dict(metric.points)


def histogram(registry: Registry, instrument: Instrument, labels: Labels = ()) -> HistogramPoint:
    point = points(registry, instrument)[labels]
    assert isinstance(point, HistogramPoint)
    return point


def test_a_counter_adds_up_by_its_labels() -> None:
    registry = Registry()
    sent, total = registry.counter(SENT), registry.counter(TOTAL)
    assert points(registry, SENT) == {}
    assert points(registry, TOTAL) == {(): 0}, "a counter without labels is there before it counts"
    sent.add(2, ("red",))
    sent.add(0.5, ("red",))
    sent.add(0, ("blue",))
    total.add(1)
    assert points(registry, SENT) == {("red",): 2.5, ("blue",): 0}
    assert points(registry, TOTAL) == {(): 1}


def test_a_histogram_by_hand() -> None:
    """Bounds 0.1, 1, 10: a value on a bound is in the bucket below it, as in Prometheus and OpenTelemetry."""
    registry = Registry()
    times = registry.histogram(TIMES)
    assert histogram(registry, TIMES) == HistogramPoint(0, 0.0, (0, 0, 0, 0), (None,) * 4)
    times.record(0.05)
    times.record(0.1)
    times.record(0.5, times=3)
    times.record(10.0)
    times.record(10.5, times=2)
    assert histogram(registry, TIMES).bucket_counts == (2, 3, 1, 2)
    assert histogram(registry, TIMES).count == 8
    assert histogram(registry, TIMES).sum == pytest.approx(0.05 + 0.1 + 1.5 + 10 + 21)


def test_a_bucket_keeps_its_newest_exemplar() -> None:
    registry = Registry()
    times = registry.histogram(TIMES)
    old, new = Exemplar(0.5, "a" * 32, "b" * 16, 1.0), Exemplar(0.6, "c" * 32, "d" * 16, 2.0)
    for exemplar in (old, new, None):
        times.record(0.5, exemplar=exemplar)
    assert histogram(registry, TIMES).exemplars == (None, new, None, None)


def test_gauges_and_observed_counters_are_asked_at_each_snapshot() -> None:
    registry = Registry()
    calls: list[str] = []
    level: dict[Labels, float] = {("left",): 0.5}
    registry.on_snapshot(lambda: calls.append("before"))

    def read() -> dict[Labels, float]:
        calls.append("read")
        return dict(level)

    registry.gauge(LEVEL, read)
    registry.observed_counter(TOTAL, lambda: {(): 7})
    assert points(registry, LEVEL) == {("left",): 0.5}
    level[("right",)] = 0.25
    assert points(registry, LEVEL) == {("left",): 0.5, ("right",): 0.25}
    assert points(registry, TOTAL) == {(): 7}
    assert calls == ["before", "read"] * 3


def test_a_gauge_without_a_value_has_no_point() -> None:
    registry = Registry()
    none = Instrument("test.none", Kind.GAUGE, "By", "Nothing.")
    registry.gauge(none, dict)
    assert points(registry, none) == {}


def test_labels_are_bounded() -> None:
    registry = Registry()
    sent = registry.counter(SENT)
    registry.gauge(LEVEL, lambda: {(str(i),): 1.0 for i in range(MOST_LABEL_SETS + 50)})
    for i in range(MOST_LABEL_SETS + 50):
        sent.add(1, (str(i),))
    sent.add(1, ("0",))
    for instrument in (SENT, LEVEL):
        found = points(registry, instrument)
        assert len(found) == MOST_LABEL_SETS + 1
        assert found[(OTHER,)] == 50
    assert points(registry, SENT)[("0",)] == 2


def test_what_is_wrong_is_refused() -> None:
    registry = Registry()
    sent, times = registry.counter(SENT), registry.histogram(TIMES)
    with pytest.raises(ValueError, match="cannot count -1"):
        sent.add(-1, ("red",))
    with pytest.raises(ValueError, match="cannot count nan"):
        sent.add(float("nan"), ("red",))
    with pytest.raises(ValueError, match="has the labels"):
        sent.add(1)
    for value in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="a histogram cannot count"):
            times.record(value)
    with pytest.raises(ValueError, match="registered already"):
        registry.counter(SENT)
    with pytest.raises(ValueError, match="is a gauge, not a counter"):
        registry.counter(LEVEL)
    assert points(registry, SENT) == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("one", Kind.COUNTER, "1", ""), "no name"),
        (("a.B", Kind.COUNTER, "1", ""), "no name"),
        (("a.b", Kind.HISTOGRAM, "s", ""), "a histogram has buckets"),
        (("a.b", Kind.GAUGE, "s", "", (), (1.0,)), "a histogram has buckets"),
        (("a.b", Kind.HISTOGRAM, "s", "", (), (1.0, 1.0)), "do not rise"),
        (("a.b", Kind.COUNTER, "s", "", ("x", "x")), "named twice"),
    ],
)
def test_a_definition_is_checked(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Instrument(*arguments)  # type: ignore[arg-type]  # pytest's parameters have no types


def test_a_snapshot_says_when_it_was_made() -> None:
    before = time.time()
    registry = Registry()
    first, second = registry.snapshot(), registry.snapshot()
    assert before <= first.started_at_s == second.started_at_s <= first.at_s <= second.at_s <= time.time()


def test_a_snapshot_of_one_moment_does_not_change() -> None:
    registry = Registry()
    times, total = registry.histogram(TIMES), registry.counter(TOTAL)
    times.record(1.0)
    total.add(1)
    old = registry.snapshot()
    times.record(1.0)
    total.add(1)
    assert [metric.points[()] for metric in old.metrics] == [
        HistogramPoint(1, 1.0, (0, 1, 0, 0), (None,) * 4),
        1,
    ]


def test_threads_lose_nothing() -> None:
    registry = Registry()
    sent, times = registry.counter(SENT), registry.histogram(TIMES)

    def work() -> None:
        for i in range(2000):
            sent.add(1, (str(i % 3),))
            times.record(0.5)
            if i % 500 == 0:
                registry.snapshot()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(sent.points().values()) == histogram(registry, TIMES).count == 8000


@given(
    st.lists(st.tuples(st.floats(0, 100), st.integers(0, 5))),
    st.lists(st.floats(0, 50), min_size=1, unique=True).map(lambda bounds: tuple(sorted(bounds))),
)
def test_the_counts_of_buckets_add_up(values: list[tuple[float, int]], bounds: tuple[float, ...]) -> None:
    """Compared with a plain witness: for each bound, how many values are at most that bound."""
    instrument = Instrument("test.any", Kind.HISTOGRAM, "s", "Any.", (), bounds)
    registry = Registry()
    recorder = registry.histogram(instrument)
    for value, times in values:
        recorder.record(value, times)
    point = histogram(registry, instrument)
    all_values = [value for value, times in values for _ in range(times)]
    assert sum(point.bucket_counts) == point.count == len(all_values)
    assert point.sum == pytest.approx(sum(all_values))
    for i, bound in enumerate(bounds):
        assert sum(point.bucket_counts[: i + 1]) == sum(value <= bound for value in all_values)


def test_what_cannot_be_read_is_left_out_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry()
    registry.counter(TOTAL).add(3)
    levels: dict[Labels, float] | None = None

    def read() -> dict[Labels, float]:
        if levels is None:
            raise RuntimeError("the device is lost")
        return levels

    registry.gauge(LEVEL, read)
    for _ in range(2):
        assert (points(registry, LEVEL), points(registry, TOTAL)) == ({}, {(): 3})
    levels = {("left",): 0.5}
    assert points(registry, LEVEL) == levels
    levels = None
    assert points(registry, LEVEL) == {}
    assert [record.getMessage() for record in caplog.records] == [
        "test.level cannot be read; this is told once until it can be"
    ] * 2
    assert "the device is lost" in caplog.text
