"""Makes OpenTelemetry's metric data of what registries hold, under the names of the instruments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

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

_CUMULATIVE = AggregationTemporality.CUMULATIVE


def metrics_data(snapshots: Sequence[Snapshot], resource: Resource, scope: str) -> MetricsData:
    """All metrics of these snapshots, as the state of one `resource`. `scope` names who measured."""
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
    """The labels that have a value."""
    return {name: value for name, value in zip(names, values, strict=True) if value}


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
