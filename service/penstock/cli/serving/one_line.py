"""Formats log lines so that nothing that a peer sent can move the cursor, or look like another line."""

from __future__ import annotations

import logging

_ESCAPES = {i: f"\\x{i:02x}" for i in (*range(32), *range(127, 160)) if chr(i) not in "\n\t"}
_LINE_ESCAPES = _ESCAPES | {ord("\n"): "\\n", 0x2028: "\\u2028", 0x2029: "\\u2029"}


class OneLine(logging.Formatter):
    """Writes control characters as escapes. Only tracebacks have several lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record).translate(_LINE_ESCAPES)

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).translate(_ESCAPES)
