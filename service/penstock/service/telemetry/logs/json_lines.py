"""Formats each record of the log as one JSON object on one line."""

from __future__ import annotations

import datetime as dt
import json
import logging

from penstock.service.telemetry.logs.line import Line
from penstock.service.telemetry.logs.trace_ids import ids_of


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
