"""The log of a process: its lines as text or as JSON, and a thread of its own that writes them, so that a
slow disk or terminal holds up nobody who logs.

What waits to be written is bounded: beyond it lines are left out, and another line says how many.
`logging.shutdown`, which Python calls at its end, waits for a moment until everything is written.
"""

from __future__ import annotations

import abc
import contextlib
import copy
import datetime as dt
import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Literal, TextIO, get_args

LogFormat = Literal["text", "json"]
LOG_FORMATS: tuple[LogFormat, ...] = get_args(LogFormat)
MOST_WAITING = 10_000
"""How many lines may wait to be written."""
FLUSH_S = 2.0
"""How long a flush waits for what was logged before."""
_COMPLAINT_INTERVAL_S = 60.0

_TRACEBACKS = logging.Formatter()
_NAME = "penstock.log"
"""The logger under whose name `QueuedLog` tells what it had to leave out."""


class Line(abc.ABC):
    """A message that `log.info(line)` takes in place of a text. It must not change after that, because it is
    formatted later, on another thread.
    """

    __slots__ = ()

    @abc.abstractmethod
    def __str__(self) -> str:
        """Return the message in words."""

    @abc.abstractmethod
    def fields(self) -> Mapping[str, object]:
        """Return the same as values that JSON has, by name."""


IdsOf = Callable[[logging.LogRecord], Mapping[str, str]]
"""Gives what else a record belongs to, such as its `trace_id`."""


def _none(record: logging.LogRecord) -> Mapping[str, str]:
    return {}


class JsonLines(logging.Formatter):
    """Writes each record as one JSON object in ASCII, so that nothing that a peer sent can move the cursor or
    look like another line.
    """

    def __init__(self, ids_of: IdsOf = _none) -> None:
        super().__init__()
        self._ids_of = ids_of

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
        said |= self._ids_of(record)
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

    def __init__(self, ids_of: IdsOf = _none) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")
        self._ids_of = ids_of

    def formatMessage(self, record: logging.LogRecord) -> str:
        message = super().formatMessage(record).translate(_LINE_ESCAPES)
        trace_id = self._ids_of(record).get("trace_id")
        return message if trace_id is None else f"{message}, trace {trace_id}"

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).translate(_ESCAPES)


class _Descriptor:
    """Writes texts to a file descriptor without a buffer. A thread that waits in a write of `sys.stderr`
    would hold its lock, and so keep Python from ending.
    """

    def __init__(self, number: int) -> None:
        self._number = number

    def write(self, text: str) -> None:
        data = text.encode(errors="backslashreplace")
        while data:
            data = data[os.write(self._number, data) :]

    def flush(self) -> None:
        """Do nothing: there is nothing to flush."""


def stderr_handler() -> logging.Handler:
    """Make a target for the process's stderr, or for what a program has put in its place."""
    stream: TextIO | _Descriptor
    try:
        stream = _Descriptor(sys.stderr.fileno())
    except OSError:
        stream = sys.stderr
    return logging.StreamHandler(stream)


class _Complaints:
    """Says on stderr that a line could not be written, but not for every line."""

    def __init__(self) -> None:
        self._next_s = 0.0

    def tell(self, record: logging.LogRecord) -> None:
        """Tell of an error while it is being handled, in place of `logging.Handler.handleError`."""
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + _COMPLAINT_INTERVAL_S
            with contextlib.suppress(OSError, ValueError):  # stderr is gone, too
                sys.stderr.write(f"penstock: the log cannot be written: {sys.exception()!r}\n")


class QueuedLog(logging.Handler):
    """Hands records to another handler, on a thread of its own, which is the only one that uses it."""

    def __init__(self, target: logging.Handler, most_waiting: int = MOST_WAITING) -> None:
        super().__init__()
        target.handleError = _Complaints().tell  # type: ignore[method-assign]  # Python's own prints a traceback
        self._target = target
        self._most_waiting = most_waiting
        self._num_left_out = 0
        self._waiting: queue.SimpleQueue[logging.LogRecord | threading.Event | None] = queue.SimpleQueue()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="penstock-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record. Called with the handler's lock held."""
        if self._waiting.qsize() >= self._most_waiting:
            self._num_left_out += 1
            return
        try:
            self._waiting.put(_finished(record))
        except Exception:  # noqa: BLE001  a message and its arguments do not fit: logging says where that is
            self.handleError(record)

    def flush(self) -> None:
        """Wait until everything that was logged before is written, but not for long."""
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            written = threading.Event()
            self._waiting.put(written)
            written.wait(FLUSH_S)

    def close(self) -> None:
        """Write what waits, but not for long, and end the thread."""
        if not self._is_closed:
            self._is_closed = True
            self._waiting.put(None)
            self._thread.join(FLUSH_S)
            if not self._thread.is_alive():
                with contextlib.suppress(OSError):  # the disk is full, which was told
                    self._target.close()
        super().close()

    def _run(self) -> None:
        while True:
            item = self._waiting.get()
            if item is None:
                return
            if isinstance(item, logging.LogRecord):
                self._write(item)
            if self._num_left_out and (self._waiting.empty() or isinstance(item, threading.Event)):
                self._tell_left_out()
            if isinstance(item, threading.Event):
                item.set()

    def _tell_left_out(self) -> None:
        with self.lock or contextlib.nullcontext():
            left_out, self._num_left_out = self._num_left_out, 0
        message = "%d lines came faster than they could be written, and were left out"
        self._write(logging.LogRecord(_NAME, logging.WARNING, __file__, 0, message, (left_out,), None))

    def _write(self, record: logging.LogRecord) -> None:
        """Write a record. Whatever that raises, the next one is tried.

        It does not call `handle`, which would hold the target's lock while it writes: Python takes the locks
        of all handlers at its end, and would wait for ever for one that nobody reads.
        """
        try:
            self._target.emit(record)
        except Exception:  # noqa: BLE001  Python's handlers catch most, but not that a file cannot be opened again
            self._target.handleError(record)


def _finished(record: logging.LogRecord) -> logging.LogRecord:
    """Make a record that does not change any more, whatever happens to the arguments of its message."""
    if isinstance(record.msg, Line):
        return record
    copied = copy.copy(record)
    copied.msg, copied.args = record.getMessage(), None
    if record.exc_info:
        copied.exc_text = record.exc_text or _TRACEBACKS.formatException(record.exc_info)
        copied.exc_info = None
    return copied
