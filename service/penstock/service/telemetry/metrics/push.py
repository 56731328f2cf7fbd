"""Pushes metrics to an OpenTelemetry collector from time to time, on a thread of its own.

`metrics_data` makes OpenTelemetry's metric data of what registries hold, under the names of the instruments,
and `Push` sends it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from opentelemetry.sdk.metrics import Exemplar as OtlpExemplar
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    HistogramDataPoint,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.metrics.export import Histogram as OtlpHistogram
from opentelemetry.sdk.metrics.export import Metric as OtlpMetric
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from penstock.runtime.measuring.instruments import Kind
from penstock.runtime.measuring.snapshot import Exemplar, HistogramPoint, Labels, Metric, Snapshot

log = logging.getLogger(__name__)

_CUMULATIVE = AggregationTemporality.CUMULATIVE


def metrics_data(snapshots: Sequence[Snapshot], resource: Resource, scope: str) -> MetricsData:
    """Return all metrics of these snapshots, as the state of one `resource`. `scope` names who measured."""
    metrics = [made for snapshot in snapshots for made in _metrics(snapshot)]
    scoped = ScopeMetrics(InstrumentationScope(scope), metrics, "")
    return MetricsData([ResourceMetrics(resource, [scoped], resource.schema_url)])


def _metrics(snapshot: Snapshot) -> Iterator[OtlpMetric]:
    began_ns, now_ns = _ns(snapshot.started_at_s), _ns(snapshot.at_s)
    for metric in snapshot.metrics:
        if metric.points:
            instrument = metric.instrument
            yield OtlpMetric(
                instrument.name, instrument.description, instrument.unit, _data(metric, began_ns, now_ns)
            )


def _data(metric: Metric, began_ns: int, now_ns: int) -> Gauge | Sum | OtlpHistogram:
    if metric.instrument.kind is Kind.HISTOGRAM:
        return OtlpHistogram(list(_histogram_points(metric, began_ns, now_ns)), _CUMULATIVE)
    points = list(_number_points(metric, began_ns, now_ns))
    if metric.instrument.kind is Kind.COUNTER:
        return Sum(points, _CUMULATIVE, is_monotonic=True)
    return Gauge(points)


def _number_points(metric: Metric, began_ns: int, now_ns: int) -> Iterator[NumberDataPoint]:
    names = metric.instrument.labels
    for values, point in metric.points.items():
        assert not isinstance(point, HistogramPoint)
        yield NumberDataPoint(_attributes(names, values), began_ns, now_ns, point)


def _histogram_points(metric: Metric, began_ns: int, now_ns: int) -> Iterator[HistogramDataPoint]:
    none: Any = None  # the least and the greatest value are not known, and the wire form need not have them
    for values, point in metric.points.items():
        assert isinstance(point, HistogramPoint)
        yield HistogramDataPoint(
            attributes=_attributes(metric.instrument.labels, values),
            start_time_unix_nano=began_ns,
            time_unix_nano=now_ns,
            count=point.count,
            sum=point.sum,
            bucket_counts=point.bucket_counts,
            explicit_bounds=metric.instrument.buckets,
            min=none,
            max=none,
            exemplars=list(_exemplars(point.exemplars)),
        )


def _exemplars(exemplars: Iterable[Exemplar | None]) -> Iterator[OtlpExemplar]:
    for exemplar in exemplars:
        if exemplar is not None:
            span_id, trace_id = int(exemplar.span_id, 16), int(exemplar.trace_id, 16)
            yield OtlpExemplar({}, exemplar.value, _ns(exemplar.at_s), span_id, trace_id)


def _attributes(names: Labels, values: Labels) -> dict[str, str]:
    """Return the labels that have a value."""
    return {name: value for name, value in zip(names, values, strict=True) if value}


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


SCOPE = "penstock"
"""Who measured, in OpenTelemetry's terms."""
_LAST_MOMENT_S = 0.5
"""How long the thread may take to notice that its exporter was closed."""


class MetricExporter(Protocol):
    """Sends metrics, and logs if they cannot be sent."""

    def export(self, metrics: MetricsData) -> bool:
        """Send metrics, and wait for the answer. Returns whether they were taken."""

    def hurry(self, within_s: float) -> None:
        """Try nothing twice from now on, and end the last attempt within this time. From any thread."""

    def close(self) -> None:
        """End for good, also an attempt that is under way. From any thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collector:
    """Where metrics are pushed to, and how often."""

    exporter: MetricExporter
    resource: Resource
    """What the metrics say about their sender."""
    interval_s: float

    def push_of(self, read: Callable[[], Sequence[Snapshot]]) -> Push:
        """Make what pushes there what `read` returns; see `Push`."""
        return Push(self, read)


class Push:
    """Pushes what `read` returns. What could not be pushed is not lost: the next push has it, too."""

    def __init__(self, collector: Collector, read: Callable[[], Sequence[Snapshot]]) -> None:
        """`read` may block for a moment, and may raise. The first push is after one interval."""
        self._collector = collector
        self._read = read
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-push", daemon=True)

    def start(self) -> None:
        """Begin to push."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Push once more and end, within about `timeout_s` seconds. Blocks. May be called twice, and without
        `start`.
        """
        self._collector.exporter.hurry(timeout_s)
        self._ending.set()
        has_started = self._thread.ident is not None
        if has_started:
            self._thread.join(timeout_s)
        self._collector.exporter.close()
        if has_started:
            self._thread.join(_LAST_MOMENT_S)

    def _run(self) -> None:
        goes_on = True
        while goes_on:
            goes_on = not self._ending.wait(self._collector.interval_s)
            try:
                data = metrics_data(self._read(), self._collector.resource, SCOPE)
                self._collector.exporter.export(data)
            except Exception:  # the thread must outlive one snapshot that cannot be made
                log.exception("metrics cannot be pushed")
