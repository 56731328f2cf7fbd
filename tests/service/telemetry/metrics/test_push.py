"""Metrics that are pushed, as OpenTelemetry's wire form has them."""

from __future__ import annotations

import threading
import time

from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality
from opentelemetry.sdk.metrics.export import MetricsData
from opentelemetry.sdk.resources import Resource

from penstock.service.telemetry.metrics.push import Collector, Push, metrics_data
from tests.service.telemetry.metrics.sample_metrics import SPAN_ID, TRACE_ID, sample_registry

WAIT_S = 20.0
RESOURCE = Resource({"service.name": "penstock", "service.instance.id": "one"})


class Kept:
    """An exporter that keeps what it is given."""

    def __init__(self, hangs: bool = False) -> None:
        self.taken: list[MetricsData] = []
        self.pushed = threading.Semaphore(0)
        self.closed = threading.Event()
        self.hurried_s: float | None = None
        self._hangs = hangs

    def export(self, metrics: MetricsData) -> bool:
        self.taken.append(metrics)
        self.pushed.release()
        return not self._hangs or not self.closed.wait(WAIT_S)

    def hurry(self, within_s: float) -> None:
        self.hurried_s = within_s

    def close(self) -> None:
        self.closed.set()


def push_to(exporter: Kept, read=lambda: [sample_registry().snapshot()], interval_s: float = 60.0) -> Push:
    return Push(Collector(exporter=exporter, resource=RESOURCE, interval_s=interval_s), read)


def wire_of(*snapshots):
    """Everything as the collector gets it: the metrics by name, and the resource."""
    (sent,) = encode_metrics(metrics_data(snapshots, RESOURCE, "penstock")).resource_metrics
    (scoped,) = sent.scope_metrics
    assert scoped.scope.name == "penstock"
    return {metric.name: metric for metric in scoped.metrics}, sent.resource


def labels_of(point) -> dict[str, str]:
    return {pair.key: pair.value.string_value for pair in point.attributes}


def test_the_wire_form():
    snapshot = sample_registry().snapshot()
    metrics, resource = wire_of(snapshot)
    assert labels_of(resource) == {"service.name": "penstock", "service.instance.id": "one"}
    (running,) = metrics["penstock.outputs.running"].gauge.data_points
    assert running.as_int == 3
    assert metrics["penstock.outputs.running"].unit == "{output}"
    finished = metrics["penstock.outputs.finished"].sum
    assert finished.is_monotonic
    assert finished.aggregation_temporality == AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
    assert {labels_of(point)["reason"]: point.as_int for point in finished.data_points} == {
        "eos": 4,
        "stop": 1,
        "max_tokens": 2,
        "cancelled": 5,
    }
    began_ns, now_ns = finished.data_points[0].start_time_unix_nano, finished.data_points[0].time_unix_nano
    assert abs(began_ns / 1e9 - snapshot.started_at_s) < 1e-3
    assert abs(now_ns / 1e9 - snapshot.at_s) < 1e-3


def test_histograms_and_exemplars():
    metrics, _ = wire_of(sample_registry().snapshot())
    first = metrics["gen_ai.server.time_to_first_token"]
    assert first.unit == "s"
    points = {labels_of(point)["gen_ai.operation.name"]: point for point in first.histogram.data_points}
    text = points["text_completion"]
    assert (text.count, len(text.bucket_counts)) == (3, len(text.explicit_bounds) + 1)
    by_bound = dict(zip([*text.explicit_bounds, "inf"], text.bucket_counts, strict=True))
    assert (by_bound[0.02], by_bound[0.04], by_bound["inf"]) == (0, 2, 1)  # not added up, unlike Prometheus'
    assert not text.HasField("min")
    assert not text.HasField("max")
    (exemplar,) = text.exemplars
    assert (exemplar.trace_id.hex(), exemplar.span_id.hex()) == (TRACE_ID, SPAN_ID)
    assert (exemplar.as_double, exemplar.time_unix_nano) == (0.03, 1_700_000_000_500_000_000)
    assert not points["chat"].exemplars


def test_a_label_without_a_value_is_left_out():
    metrics, _ = wire_of(sample_registry().snapshot())
    (point,) = metrics["gen_ai.server.request.duration"].histogram.data_points
    assert "error.type" not in labels_of(point)


def test_it_pushes_again_and_again_until_it_is_stopped():
    exporter = Kept()
    push = push_to(exporter, interval_s=0.01)
    push.start()
    for _ in range(3):
        assert exporter.pushed.acquire(timeout=WAIT_S)
    push.stop(WAIT_S)
    pushed = len(exporter.taken)
    assert exporter.closed.is_set()
    time.sleep(0.1)
    assert len(exporter.taken) == pushed


def test_the_end_is_pushed_too():
    exporter = Kept()
    push = push_to(exporter)
    push.start()
    push.stop(7.0)
    assert len(exporter.taken) == 1
    assert exporter.hurried_s == 7.0


def test_an_exporter_that_hangs_is_closed_in_time():
    exporter = Kept(hangs=True)
    push = push_to(exporter, interval_s=0.01)
    push.start()
    assert exporter.pushed.acquire(timeout=WAIT_S)
    push.stop(0.1)
    assert exporter.closed.is_set()


def test_a_snapshot_that_fails_does_not_end_the_pushes(caplog):
    left = [RuntimeError("no such device")]

    def read():
        if left:
            raise left.pop()
        return [sample_registry().snapshot()]

    exporter = Kept()
    push = push_to(exporter, read, interval_s=0.01)
    push.start()
    assert exporter.pushed.acquire(timeout=WAIT_S)
    push.stop(WAIT_S)
    assert "metrics cannot be pushed" in caplog.text


def test_stopping_what_was_never_started():
    exporter = Kept()
    push_to(exporter).stop(0.1)
    assert exporter.taken == []
    assert exporter.closed.is_set()
