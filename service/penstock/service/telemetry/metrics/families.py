"""Makes prometheus_client's metric families of what registries hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.samples import Exemplar as PrometheusExemplar
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from penstock.runtime.measuring.snapshot import Exemplar, HistogramPoint, Labels, Metric
from penstock.service.telemetry.metrics.names import family_name, is_info, prometheus_unit, underscored


def families(metrics: Iterable[Metric]) -> Iterator[Family]:
    """One family for each metric that has a point, made when it is asked for."""
    for metric in metrics:
        if metric.points:
            yield family(metric)


def family(metric: Metric) -> Family:
    """The family of one metric, under our own name."""
    instrument = metric.instrument
    kind = "info" if is_info(instrument) else instrument.kind.value
    made = Family(family_name(instrument), instrument.description, kind, prometheus_unit(instrument))
    fill(made, tuple(map(underscored, instrument.labels)), metric.points, instrument.buckets)
    return made


def fill(
    made: Family,
    names: Labels,
    points: Mapping[Labels, float | HistogramPoint],
    buckets: tuple[float, ...] = (),
) -> None:
    """Add samples to the family. `names` are those of the labels; a label without a value is left out, as
    Prometheus treats both alike.
    """
    suffix = {"counter": "_total", "info": "_info"}.get(made.type, "")
    for values, point in points.items():
        labels = {name: value for name, value in zip(names, values, strict=True) if value}
        if isinstance(point, HistogramPoint):
            made.samples.extend(_histogram(made.name, labels, buckets, point))
        else:
            made.samples.append(Sample(made.name + suffix, labels, point))


def _histogram(
    name: str, labels: dict[str, str], buckets: tuple[float, ...], point: HistogramPoint
) -> Iterator[Sample]:
    bounds = [*map(floatToGoString, buckets), "+Inf"]
    totals = accumulate(point.bucket_counts)
    for bound, total, exemplar in zip(bounds, totals, point.exemplars, strict=True):
        told = None if exemplar is None else _exemplar(exemplar)
        yield Sample(f"{name}_bucket", {**labels, "le": bound}, total, None, told)
    yield Sample(f"{name}_count", labels, point.count)
    yield Sample(f"{name}_sum", labels, point.sum)


def _exemplar(exemplar: Exemplar) -> PrometheusExemplar:
    spans = {"trace_id": exemplar.trace_id, "span_id": exemplar.span_id}
    return PrometheusExemplar(spans, exemplar.value, exemplar.at_s)
