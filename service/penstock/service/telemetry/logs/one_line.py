"""Formats records of the log as text, so that nothing that a peer sent can move the cursor, or look like
another line.
"""

from __future__ import annotations

import logging

from penstock.service.telemetry.logs.trace_ids import ids_of

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
