"""Notes which span a record of the log belongs to, which its line tells."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from opentelemetry.trace import SpanContext, format_span_id, format_trace_id

from penstock.service.telemetry.tracing.service_spans import CURRENT_RPC

_ATTRIBUTE = "penstock_span"


def note_span(record: logging.LogRecord) -> bool:
    """Note the span of the RPC that the running task serves, if that is recorded. A filter of a handler, so
    it is called where the record is made. Always true.
    """
    context = CURRENT_RPC.get().get_span_context()
    if context.trace_flags.sampled:
        setattr(record, _ATTRIBUTE, context)
    return True


def ids_of(record: logging.LogRecord) -> Mapping[str, str]:
    """Return `trace_id` and `span_id` in hexadecimal digits; nothing if the record belongs to no recorded
    RPC.
    """
    context: SpanContext | None = getattr(record, _ATTRIBUTE, None)
    if context is None:
        return {}
    return {"trace_id": format_trace_id(context.trace_id), "span_id": format_span_id(context.span_id)}
