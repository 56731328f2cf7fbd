"""Sends spans and metrics to a collector, and counts what it has taken.

OpenTelemetry's own exporters are not used, because they take a batch for sent that the collector refused in
part, or answered with a redirect, and because nothing ends an answer of theirs that comes byte by byte. Its
encoders are.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from google.protobuf.message import DecodeError
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.metrics.export import MetricsData
from opentelemetry.sdk.resources import Resource

from penstock.service.telemetry.options import TracingOptions
from penstock.service.telemetry.otlp.destination import Destination
from penstock.service.telemetry.otlp.environment import destination
from penstock.service.telemetry.otlp.sender import Sender, sender_to
from penstock.service.telemetry.otlp.span_batch import AnySpan, SpanBatches
from penstock.service.telemetry.otlp.transport import Failed, quoted

log = logging.getLogger(__name__)

_BETWEEN_LINES_S = 60.0


def metric_exporter(options: TracingOptions) -> OtlpMetricExporter | None:
    """What sends metrics, by options and environment; None if they go nowhere. Raises ConfigError."""
    to = destination(options, "metrics")
    return None if to is None else OtlpMetricExporter(sender_to(to), to)


class OtlpSpanExporter:
    """Sends spans. Used by one thread, but for `hurry` and `close`, which any may call."""

    def __init__(self, sender: Sender, to: Destination, resource: Resource) -> None:
        """`resource` is that of the spans in wire form."""
        self._sender = sender
        self._batches = SpanBatches(resource)
        self._complaints = Complaints(f"spans do not reach {to.url}")

    def export(self, spans: Sequence[AnySpan]) -> int:
        """Send spans, and wait for the answer. Returns how many of them the collector has taken. Raises what
        the encoder raises.
        """
        answer = self._sender.send(self._batches.request(spans))
        if isinstance(answer, Failed):
            self._complaints.tell(answer.why)
            return 0
        reply = ExportTraceServiceResponse()
        try:
            reply.ParseFromString(answer.answer)
        except DecodeError:  # it has said OK
            return len(spans)
        partial = reply.partial_success
        rejected = min(max(partial.rejected_spans, 0), len(spans))
        self._complaints.look(rejected, partial.error_message)
        return len(spans) - rejected

    def hurry(self, within_s: float) -> None:
        """Wait for nothing from now on, and end the last attempt within this time."""
        self._sender.hurry(within_s)

    def close(self) -> None:
        """End for good, also an attempt that is under way."""
        self._sender.close()


class OtlpMetricExporter:
    """Sends metrics. Used by one thread, but for `hurry` and `close`, which any may call."""

    def __init__(self, sender: Sender, to: Destination) -> None:
        self._sender = sender
        self._complaints = Complaints(f"metrics do not reach {to.url}")

    def export(self, metrics: MetricsData) -> bool:
        """Send metrics, and wait for the answer. Returns whether the collector has taken all of them. Raises
        what the encoder raises.
        """
        answer = self._sender.send(encode_metrics(metrics).SerializeToString())
        if isinstance(answer, Failed):
            self._complaints.tell(answer.why)
            return False
        reply = ExportMetricsServiceResponse()
        try:
            reply.ParseFromString(answer.answer)
        except DecodeError:  # it has said OK
            return True
        partial = reply.partial_success
        self._complaints.look(max(partial.rejected_data_points, 0), partial.error_message)
        return partial.rejected_data_points <= 0

    def hurry(self, within_s: float) -> None:
        """Wait for nothing from now on, and end the last attempt within this time."""
        self._sender.hurry(within_s)

    def close(self) -> None:
        """End for good, also an attempt that is under way."""
        self._sender.close()


class Complaints:
    """Logs that exports fail, at most once a minute, and that they work again."""

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`what` begins each line. `clock` gives seconds."""
        self._what, self._clock = what, clock
        self._told_at_s: float | None = None
        self._is_told = False
        """Whether the last line said that exports fail."""
        self._count = 0

    def tell(self, why: str) -> None:
        """An export has failed."""
        self._count += 1
        now_s = self._clock()
        if self._told_at_s is None or now_s - self._told_at_s >= _BETWEEN_LINES_S:
            self._told_at_s, self._is_told = now_s, True
            log.warning("%s: %s (%d failed exports so far)", self._what, why, self._count)

    def look(self, rejected: int, message: str) -> None:
        """An export was taken, but for `rejected` items, or with a warning."""
        if rejected or message:
            self.tell(f"{rejected} were rejected {quoted(message)}".rstrip())
        elif self._is_told:
            self._is_told = False
            log.info("%s: that is over, after %d failed exports", self._what, self._count)
