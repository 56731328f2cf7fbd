"""Makes the request that carries a batch of spans to a collector."""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext

from penstock.service.telemetry.otlp import wire

AnySpan = ReadableSpan | bytes
"""A span of OpenTelemetry's, or one in the wire form that `wire.span` makes."""
SCOPE = "penstock.service"
"""The instrumentation scope of all spans."""
_RESOURCE_SPANS, _SCOPE_SPANS = 0x0A, 0x12  # the tags of these fields


class SpanBatches:
    """Makes requests whose spans belong to one resource."""

    def __init__(self, resource: Resource) -> None:
        """`resource` is that of the spans in wire form. Those of OpenTelemetry know their own."""
        any_span = ReadableSpan("", SpanContext(1, 1, is_remote=False), resource=resource)
        (made,) = encode_spans([any_span]).resource_spans
        kept = ResourceSpans(resource=made.resource, schema_url=made.schema_url)
        self._resource: bytes = kept.SerializeToString()
        scope = made.scope_spans[0]
        del scope.spans[:]
        scope.scope.name = SCOPE
        self._scope: bytes = scope.SerializeToString()

    def request(self, spans: Sequence[AnySpan]) -> bytes:
        """An ExportTraceServiceRequest in wire form. Raises what OpenTelemetry's encoder raises."""
        readable = [span for span in spans if isinstance(span, ReadableSpan)]
        made: bytes = encode_spans(readable).SerializeToString() if readable else b""
        written = [span for span in spans if isinstance(span, bytes)]
        if written:
            scope = wire.sized(_SCOPE_SPANS, self._scope + b"".join(written))
            made += wire.sized(_RESOURCE_SPANS, self._resource + scope)
        return made
