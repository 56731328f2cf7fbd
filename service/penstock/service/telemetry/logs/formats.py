"""Formats records of the log: as one JSON object on one line, or as text, so that nothing that a peer sent
can move the cursor, or look like another line. Both say which trace a record belongs to.
"""

from __future__ import annotations

import datetime as dt
import json
import logging
from collections.abc import Mapping

from opentelemetry.trace import SpanContext, format_span_id, format_trace_id

from penstock.service.telemetry.logs.lines import Line
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
    """`trace_id` and `span_id` in hexadecimal digits; nothing if the record belongs to no recorded RPC."""
    context: SpanContext | None = getattr(record, _ATTRIBUTE, None)
    if context is None:
        return {}
    return {"trace_id": format_trace_id(context.trace_id), "span_id": format_span_id(context.span_id)}


class JsonLines(logging.Formatter):
    """Writes ASCII only, so that nothing that a peer sent can move the cursor or look like another line."""

    def format(self, record: logging.LogRecord) -> str:
        at = dt.datetime.fromtimestamp(record.created, dt.UTC)
        said: dict[str, object] = {
            "ts": at.isoformat(timespec="microseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if isinstance(record.msg, Line):
            said |= record.msg.fields()
        said |= ids_of(record)
        if record.exc_info and not record.exc_text:
            record.exc_text = self.formatException(record.exc_info)
        if record.exc_text:
            said["exception"] = record.exc_text
        if record.stack_info:
            said["stack"] = record.stack_info
        return json.dumps(said)


_ESCAPES = {i: f"\\x{i:02x}" for i in (*range(32), *range(127, 160)) if chr(i) not in "\n\t"}
_LINE_ESCAPES = _ESCAPES | {ord("\n"): "\\n", 0x2028: "\\u2028", 0x2029: "\\u2029"}


class OneLine(logging.Formatter):
    """Writes control characters as escapes. Only tracebacks have several lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        message = super().formatMessage(record).translate(_LINE_ESCAPES)
        trace_id = ids_of(record).get("trace_id")
        return message if trace_id is None else f"{message}, trace {trace_id}"

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).translate(_ESCAPES)
