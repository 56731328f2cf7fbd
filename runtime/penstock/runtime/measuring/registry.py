"""Registry: the values of all instruments of one engine and its service.

There is one definition of each metric, and several ways out: all read `Registry.snapshot`.
"""

from __future__ import annotations

import bisect
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from penstock.runtime.measuring.instruments import Instrument, Kind
from penstock.runtime.measuring.snapshot import Exemplar, HistogramPoint, Labels, Metric, Snapshot

log = logging.getLogger(__name__)

MOST_LABEL_SETS = 200
"""Of one instrument. Values with any further labels are counted under OTHER, so that no caller can fill the
memory of the server, or of who collects its metrics."""
OTHER = "other"
"""The value of every label of what is beyond MOST_LABEL_SETS."""

Read = Callable[[], Mapping[Labels, float]]
"""Says the values of an instrument now, by their labels. It may take locks, but must not block for long."""

PointT = TypeVar("PointT")


class _Points(Generic[PointT]):
    """The points of one instrument by their labels, which are bounded in number."""

    __slots__ = ("_by_labels", "_instrument", "_new")

    def __init__(self, instrument: Instrument, new: Callable[[], PointT]) -> None:
        self._instrument = instrument
        self._new = new
        self._by_labels: dict[Labels, PointT] = {} if instrument.labels else {(): new()}

    def at(self, labels: Labels) -> PointT:
        """Return the point with these labels, which may be new."""
        point = self._by_labels.get(labels)
        return self._made(labels) if point is None else point

    def _made(self, labels: Labels) -> PointT:
        names = self._instrument.labels
        if len(labels) != len(names):
            raise ValueError(f"{self._instrument.name} has the labels {names}, not the values {labels}")
        if len(self._by_labels) >= MOST_LABEL_SETS:
            labels = (OTHER,) * len(names)
        return self._by_labels.setdefault(labels, self._new())

    def all(self) -> Mapping[Labels, PointT]:
        return self._by_labels


@dataclass(slots=True)
class _Total:
    value: float = 0


class Counter:
    """Adds up. Any thread may use it."""

    def __init__(self, instrument: Instrument, lock: threading.Lock) -> None:
        self._lock = lock
        self._points = _Points(instrument, _Total)

    def add(self, amount: float, labels: Labels = ()) -> None:
        """Add to the total of these labels; with 0 they are shown from now on. ValueError if `amount` is
        negative, or if the instrument has another number of labels.
        """
        if not amount >= 0:
            raise ValueError(f"a counter cannot count {amount}")
        with self._lock:
            self._points.at(labels).value += amount

    def points(self) -> dict[Labels, float]:
        """Return the totals now, by their labels."""
        with self._lock:
            return {labels: total.value for labels, total in self._points.all().items()}


class _Buckets:
    """The values of a histogram that have the same labels."""

    __slots__ = ("counts", "exemplars", "sum")

    def __init__(self, size: int) -> None:
        self.counts = [0] * size
        self.sum = 0.0
        self.exemplars: list[Exemplar | None] = [None] * size

    def point(self) -> HistogramPoint:
        return HistogramPoint(sum(self.counts), self.sum, tuple(self.counts), tuple(self.exemplars))


class Histogram:
    """Counts values by the buckets into which they fall. Any thread may use it."""

    def __init__(self, instrument: Instrument, lock: threading.Lock) -> None:
        self._lock = lock
        self._bounds = instrument.buckets
        size = len(instrument.buckets) + 1
        self._points = _Points(instrument, lambda: _Buckets(size))

    def record(
        self, value: float, times: int = 1, labels: Labels = (), exemplar: Exemplar | None = None
    ) -> None:
        """Count a value `times` times. ValueError if it is no finite number, or if the instrument has
        another number of labels.
        """
        if not math.isfinite(value):
            raise ValueError(f"a histogram cannot count {value}")
        i = bisect.bisect_left(self._bounds, value)
        with self._lock:
            point = self._points.at(labels)
            point.counts[i] += times
            point.sum += value * times
            if exemplar is not None:
                point.exemplars[i] = exemplar

    def points(self) -> dict[Labels, HistogramPoint]:
        """Return the values so far, by their labels."""
        with self._lock:
            return {labels: buckets.point() for labels, buckets in self._points.all().items()}


class Registry:
    """Makes the means to measure, and snapshots of all that was measured. Any thread may use it.

    Every instrument may be registered once, else ValueError.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Over all values, and over the instruments. No code from elsewhere runs under it."""
        self._one_snapshot = threading.Lock()
        self._started_at_s = time.time()
        self._points: dict[str, tuple[Instrument, Callable[[], Mapping[Labels, float | HistogramPoint]]]] = {}
        self._before: list[Callable[[], None]] = []
        self._failing: set[str] = set()
        """The names of the instruments whose `read` raised at the last snapshot."""

    def counter(self, instrument: Instrument) -> Counter:
        """Return what counts for this instrument."""
        counter = Counter(instrument, self._lock)
        self._register(instrument, Kind.COUNTER, counter.points)
        return counter

    def histogram(self, instrument: Instrument) -> Histogram:
        """Return what counts values for this instrument."""
        histogram = Histogram(instrument, self._lock)
        self._register(instrument, Kind.HISTOGRAM, histogram.points)
        return histogram

    def gauge(self, instrument: Instrument, read: Read) -> None:
        """Ask `read` for the values of this instrument at each snapshot."""
        self._register(instrument, Kind.GAUGE, lambda: _bounded(instrument, read()))

    def observed_counter(self, instrument: Instrument, read: Read) -> None:
        """Ask `read` for the totals of this instrument at each snapshot, because somebody else keeps them."""
        self._register(instrument, Kind.COUNTER, lambda: _bounded(instrument, read()))

    def on_snapshot(self, before: Callable[[], None]) -> None:
        """Call this before each snapshot, so that it has all that happened before."""
        with self._lock:
            self._before.append(before)

    def snapshot(self) -> Snapshot:
        """Return all metrics now. Callers wait for each other. An instrument whose `read` raises has no
        points: the others are needed most when something is broken. That is logged once, until it can be read
        again.
        """
        with self._one_snapshot:
            with self._lock:
                before, registered = tuple(self._before), tuple(self._points.values())
            for prepare in before:
                prepare()
            metrics = tuple(
                Metric(instrument, self._read(instrument, read)) for instrument, read in registered
            )
            return Snapshot(time.time(), self._started_at_s, metrics)

    def _read(
        self, instrument: Instrument, read: Callable[[], Mapping[Labels, float | HistogramPoint]]
    ) -> Mapping[Labels, float | HistogramPoint]:
        try:
            points = read()
        except Exception:  # one metric that cannot be read must not take the others away
            if instrument.name not in self._failing:
                self._failing.add(instrument.name)
                log.exception("%s cannot be read; this is told once until it can be", instrument.name)
            return {}
        self._failing.discard(instrument.name)
        return points

    def _register(
        self,
        instrument: Instrument,
        kind: Kind,
        points: Callable[[], Mapping[Labels, float | HistogramPoint]],
    ) -> None:
        if instrument.kind is not kind:
            raise ValueError(f"{instrument.name} is a {instrument.kind.value}, not a {kind.value}")
        with self._lock:
            if instrument.name in self._points:
                raise ValueError(f"{instrument.name} is registered already")
            self._points[instrument.name] = (instrument, points)


def by_label(values: Mapping[str, float]) -> dict[Labels, float]:
    """Return the values of an instrument with one label, as `Read` returns them. The mapping may be one that
    another thread adds to.
    """
    return {(value,): number for value, number in dict(values).items()}


def _bounded(instrument: Instrument, values: Mapping[Labels, float]) -> dict[Labels, float]:
    """Return these values, of which those of labels beyond MOST_LABEL_SETS are added up."""
    points = _Points(instrument, _Total)
    for labels, value in values.items():
        points.at(labels).value += value
    return {labels: total.value for labels, total in points.all().items()} if values else {}
