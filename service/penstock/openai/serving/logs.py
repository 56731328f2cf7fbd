"""The log of the front: lines on stderr, written by a thread of its own, so that a slow terminal holds up no
request.

What waits to be written is bounded: beyond it lines are left out, and another line says how many.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime as dt
import json
import logging
import logging.handlers
import os
import queue
import threading
import time
from typing import Final

from penstock.openai.settings import LogFormat

MOST_WAITING: Final = 10_000
"""How many lines may wait to be written."""
FLUSH_S: Final = 2.0
"""How long the end of the process waits for lines that are not written yet."""
_ESCAPES: Final = {i: f"\\x{i:02x}" for i in (*range(32), *range(127, 160), 0x2028, 0x2029)}
_QUIET: Final = {"asyncio": logging.WARNING, "uvicorn.error": logging.ERROR}
"""Libraries whose lines below this level say nothing to operators; uvicorn warns of each peer that speaks no
HTTP.
"""


def open_logs(log_format: LogFormat) -> None:
    """Send all that is logged in this process to stderr, in this format."""
    formatter = JsonLines() if log_format == "json" else OneLine()
    waiting: queue.Queue[logging.LogRecord] = queue.Queue(MOST_WAITING)
    # No handler writes: Python locks all of them at its end, and would wait for one that waits itself.
    threading.Thread(target=_write, args=(waiting, formatter), name="penstock-log", daemon=True).start()
    logging.basicConfig(handlers=[_Bounded(waiting)], level=logging.INFO, force=True)
    logging.captureWarnings(True)
    for name, level in _QUIET.items():
        logging.getLogger(name).setLevel(level)
    atexit.register(_wait_until_written, waiting)


def _wait_until_written(waiting: queue.Queue[logging.LogRecord]) -> None:
    """Wait for the lines that were logged before, but not for long: nobody may be reading them."""
    give_up_at = time.monotonic() + FLUSH_S
    while waiting.unfinished_tasks and time.monotonic() < give_up_at:
        time.sleep(0.005)


def _write(waiting: queue.Queue[logging.LogRecord], formatter: logging.Formatter) -> None:
    """Write records to the process's stderr, without a buffer: `sys.stderr` has a lock that Python's end
    waits for.
    """
    while True:
        record = waiting.get()
        # A closed stderr, or a record that cannot be formatted, must not end the thread.
        with contextlib.suppress(OSError, TypeError, ValueError):
            data = f"{formatter.format(record)}\n".encode(errors="backslashreplace")
            while data:
                data = data[os.write(2, data) :]
        waiting.task_done()


class OneLine(logging.Formatter):
    """Writes control characters as escapes, so that nothing that a peer sent looks like another line. Only
    tracebacks have several lines.
    """

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record).translate(_ESCAPES)


class JsonLines(logging.Formatter):
    """Writes each record as one JSON object in ASCII. The attribute `fields` of a record is added to it."""

    def format(self, record: logging.LogRecord) -> str:
        at = dt.datetime.fromtimestamp(record.created, dt.UTC)
        said: dict[str, object] = {
            "ts": at.isoformat(timespec="microseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        said |= getattr(record, "fields", {})
        if record.exc_info:
            said["exception"] = self.formatException(record.exc_info)
        return json.dumps(said)


class _Bounded(logging.handlers.QueueHandler):
    """Queues records; those beyond the bound are counted."""

    def __init__(self, waiting: queue.Queue[logging.LogRecord]) -> None:
        super().__init__(waiting)
        self._waiting = waiting
        self._num_left_out = 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Fix the message, because its arguments may change. A traceback is made on the other thread."""
        record.msg, record.args = record.getMessage(), None
        return record

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            self._num_left_out += 1
            return
        if self._num_left_out and self._waiting.qsize() < MOST_WAITING // 2:
            count, self._num_left_out = self._num_left_out, 0
            message = f"{count} lines came faster than they could be written, and were left out"
            self.enqueue(logging.LogRecord(__name__, logging.WARNING, __file__, 0, message, None, None))
