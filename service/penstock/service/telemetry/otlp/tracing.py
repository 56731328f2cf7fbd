"""What a server needs to record traces, and to send them and its metrics to a collector.

`Tracing` says how much is recorded, what makes spans, and what sends them.

`OtlpSpanExporter` and `OtlpMetricExporter` send spans and metrics to a collector, and count what it has
taken. OpenTelemetry's own exporters are not used, because they take a batch for sent that the collector
refused in part, or answered with a redirect, and because nothing ends an answer of theirs that comes byte by
byte. Its encoders are.
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
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import DEFAULT_ON, Sampler

from penstock.runtime.errors import ConfigError
from penstock.service.telemetry.options import TraceLevel, TracingOptions
from penstock.service.telemetry.otlp.environment import Destination
from penstock.service.telemetry.otlp.outbox import DELAY_S, AnySpan, Outbox, SpanBatches, SpanExporter
from penstock.service.telemetry.otlp.sdk import sampler, service_resource
from penstock.service.telemetry.otlp.sender import Failed, Sender, quoted, sender_to

log = logging.getLogger(__name__)

_BETWEEN_LINES_S = 60.0


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
        """Take `what`, which begins each line. `clock` gives seconds."""
        self._what, self._clock = what, clock
        self._told_at_s: float | None = None
        self._is_told = False
        """Whether the last line said that exports fail."""
        self._count = 0

    def tell(self, why: str) -> None:
        """Tell that an export has failed."""
        self._count += 1
        now_s = self._clock()
        if self._told_at_s is None or now_s - self._told_at_s >= _BETWEEN_LINES_S:
            self._told_at_s, self._is_told = now_s, True
            log.warning("%s: %s (%d failed exports so far)", self._what, why, self._count)

    def look(self, rejected: int, message: str) -> None:
        """Note that an export was taken, but for `rejected` items, or with a warning."""
        if rejected or message:
            self.tell(f"{rejected} were rejected {quoted(message)}".rstrip())
        elif self._is_told:
            self._is_told = False
            log.info("%s: that is over, after %d failed exports", self._what, self._count)


class Tracing:
    """The traces of one server, which ends it when it stops."""

    level: TraceLevel
    """How much is recorded. May be set at any time, by any thread."""

    def __init__(
        self,
        exporter: SpanExporter,
        *,
        level: TraceLevel = TraceLevel.STEPS,
        resource: Resource | None = None,
        sampler: Sampler = DEFAULT_ON,
        max_waiting_spans: int = TracingOptions().max_waiting_spans,
        delay_s: float = DELAY_S,
    ) -> None:
        """Start the thread that hands spans to `exporter`, each within `delay_s` seconds if it keeps up.
        Raises ConfigError if the environment has bad limits of spans (OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT and
        others).
        """
        self.level = level
        try:
            self.provider = TracerProvider(sampler=sampler, resource=resource, shutdown_on_exit=False)
        except ValueError as error:
            raise ConfigError(f"the environment: {error}") from error
        self._outbox = Outbox(exporter, max_waiting_spans, delay_s=delay_s)
        self.provider.add_span_processor(_ToOutbox(self._outbox))

    @property
    def resource(self) -> Resource:
        """What every span says about its sender."""
        return self.provider.resource

    @property
    def exported(self) -> int:
        """Spans that the collector has taken."""
        return self._outbox.exported

    @property
    def dropped(self) -> int:
        """Spans that were never sent, because too many waited."""
        return self._outbox.dropped

    @property
    def failed(self) -> int:
        """Spans that were sent in vain, or that the collector has rejected."""
        return self._outbox.failed

    @property
    def waiting(self) -> int:
        """Spans that wait to be sent."""
        return self._outbox.waiting

    def emit(self, spans: Sequence[bytes]) -> None:
        """Send spans that `wire.span` made, some time later. From any thread; never blocks. Those beyond the
        bound are dropped.
        """
        self._outbox.emit_all(spans)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all spans that wait now were sent, or have failed. Returns whether that was in time."""
        return self._outbox.flush(timeout_s)

    def shutdown(self, timeout_s: float) -> None:
        """Send what waits within this time, and end. What is left then is dropped. May be called again."""
        self._outbox.shutdown(timeout_s)


class _ToOutbox(SpanProcessor):
    """Hands the spans of the provider's tracers to the outbox."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox

    def on_end(self, span: ReadableSpan) -> None:
        context = span.context
        if context is not None and context.trace_flags.sampled:
            self._outbox.emit(span)


def tracing_to(to: Destination, options: TracingOptions, *, version: str, instance_id: str) -> Tracing:
    """Make what sends traces there, as these options and the environment say. Raises ConfigError."""
    resource = service_resource(version=version, instance_id=instance_id)
    return Tracing(
        OtlpSpanExporter(sender_to(to), to, resource),
        level=options.trace_level,
        resource=resource,
        sampler=sampler(options),
        max_waiting_spans=options.max_waiting_spans,
    )
