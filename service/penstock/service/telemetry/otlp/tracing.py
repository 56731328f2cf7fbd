"""What a server needs to record traces: how much is recorded, what makes spans, and what sends them."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import DEFAULT_ON, Sampler

from penstock.runtime.errors import ConfigError
from penstock.service.telemetry.options import TraceLevel, TracingOptions
from penstock.service.telemetry.otlp.environment import (
    destination,
    sampler,
    service_resource,
    why_off,
)
from penstock.service.telemetry.otlp.exporters import OtlpSpanExporter
from penstock.service.telemetry.otlp.outbox import DELAY_S, Outbox, SpanExporter
from penstock.service.telemetry.otlp.sender import sender_to

log = logging.getLogger(__name__)


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


def open_tracing(options: TracingOptions, *, version: str, instance_id: str) -> Tracing | None:
    """Make what these options and the environment ask for; None if traces go nowhere. Raises ConfigError."""
    to = destination(options, "traces")
    if to is None:
        if options.otlp_endpoint is not None:
            log.warning("no traces, because of %s", why_off("traces"))
        return None
    log.info("traces go to %s over %s", to.url, to.protocol)
    resource = service_resource(version=version, instance_id=instance_id)
    return Tracing(
        OtlpSpanExporter(sender_to(to), to, resource),
        level=options.trace_level,
        resource=resource,
        sampler=sampler(options),
        max_waiting_spans=options.max_waiting_spans,
    )
