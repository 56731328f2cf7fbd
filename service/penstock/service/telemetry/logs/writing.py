"""Writes the log's lines on a thread of its own, so that a slow disk or terminal holds up nobody who logs.

`open_logs` sets this up for the whole process. What waits to be written is bounded: beyond it lines are left
out, and another line says how many. `logging.shutdown`, which Python calls at its end, waits for a moment
until everything is written.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import logging.handlers
import os
import queue
import sys
import threading
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, TextIO, get_args

from penstock.runtime.errors import ConfigError
from penstock.service.telemetry.logs.formats import JsonLines, OneLine, note_span
from penstock.service.telemetry.logs.lines import Line

LogFormat = Literal["text", "json"]
LOG_FORMATS: tuple[LogFormat, ...] = get_args(LogFormat)
LogLevel = Literal["debug", "info", "warning", "error"]
LOG_LEVELS: tuple[LogLevel, ...] = get_args(LogLevel)
LEAST_FILE_BYTES = 64 * 1024
MOST_FILES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    """What the server's operator says about the log."""

    log_level: LogLevel = "info"
    log_format: LogFormat = "text"
    log_file: Path | None = None
    """The file that is written in place of stderr."""
    log_file_bytes: int = 100 * 2**20
    """How large the file may get before it is renamed to PATH.1, PATH.1 to PATH.2 and so on. 0: it is never
    renamed here, and is opened again when another program has renamed or removed it.
    """
    log_file_count: int = 5
    """How many renamed files are kept."""

    def __post_init__(self) -> None:
        bad = []
        if self.log_level not in LOG_LEVELS:
            bad.append(f"log_level: must be one of {', '.join(LOG_LEVELS)}, not {self.log_level!r}")
        if self.log_format not in LOG_FORMATS:
            bad.append(f"log_format: must be {' or '.join(LOG_FORMATS)}, not {self.log_format!r}")
        if self.log_file_bytes and self.log_file_bytes < LEAST_FILE_BYTES:
            bad.append(f"log_file_bytes: must be 0 or at least {LEAST_FILE_BYTES}, not {self.log_file_bytes}")
        if not 1 <= self.log_file_count <= MOST_FILES:
            bad.append(f"log_file_count: must be from 1 to {MOST_FILES}, not {self.log_file_count}")
        if self.log_file is None:
            defaults = {field.name: field.default for field in fields(self)}
            of_files = ("log_file_bytes", "log_file_count")
            bad += [f"{name}: needs log_file" for name in of_files if getattr(self, name) != defaults[name]]
        if bad:
            raise ConfigError("; ".join(bad))


MOST_WAITING = 10_000
"""How many lines may wait to be written."""
FLUSH_S = 2.0
"""How long a flush waits for what was logged before."""
_COMPLAINT_INTERVAL_S = 60.0
_QUIET = ("jax", "httpx", "asyncio", "filelock", "huggingface_hub", "transformers")
"""Libraries whose lines at the level INFO say nothing to operators."""

_TRACEBACKS = logging.Formatter()
_NAME = "penstock.log"
"""The logger under whose name `QueuedLog` tells what it had to leave out."""


def open_logs(options: LogOptions) -> None:
    """Send all that is logged in this process where the options say. Raises ConfigError if the file cannot
    be written.
    """
    target = _target(options)
    if options.log_format == "json":
        target.setFormatter(JsonLines())
    else:
        target.setFormatter(OneLine("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    logging.basicConfig(handlers=[QueuedLog(target)], level=options.log_level.upper(), force=True)
    logging.captureWarnings(True)
    for noisy in _QUIET:
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _target(options: LogOptions) -> logging.Handler:
    path = options.log_file
    target: logging.Handler
    if path is None:
        target = logging.StreamHandler(_stderr())
    else:
        try:
            if options.log_file_bytes:
                target = logging.handlers.RotatingFileHandler(
                    path,
                    maxBytes=options.log_file_bytes,
                    backupCount=options.log_file_count,
                    encoding="utf-8",
                    errors="backslashreplace",
                )
            else:
                target = logging.handlers.WatchedFileHandler(
                    path, encoding="utf-8", errors="backslashreplace"
                )
        except OSError as error:
            raise ConfigError(f"log_file: {path} cannot be written: {error.strerror or error}") from error
    target.handleError = _Complaints().tell  # type: ignore[method-assign]  # Python's own prints a traceback
    return target


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
        """There is nothing to flush."""


def _stderr() -> TextIO | _Descriptor:
    """Where lines go without a file: the process's stderr, or what a program has put in its place."""
    try:
        return _Descriptor(sys.stderr.fileno())
    except OSError:
        return sys.stderr


class _Complaints:
    """Says on stderr that a line could not be written, but not for every line."""

    def __init__(self) -> None:
        self._next_s = 0.0

    def tell(self, record: logging.LogRecord) -> None:
        """Called in place of `logging.Handler.handleError`, while the error is being handled."""
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + _COMPLAINT_INTERVAL_S
            with contextlib.suppress(OSError, ValueError):  # stderr is gone, too
                sys.stderr.write(f"penstock: the log cannot be written: {sys.exception()!r}\n")


class QueuedLog(logging.Handler):
    """Hands records to another handler, on a thread of its own."""

    def __init__(self, target: logging.Handler, most_waiting: int = MOST_WAITING) -> None:
        super().__init__()
        self._target = target
        self._most_waiting = most_waiting
        self._num_left_out = 0
        self._waiting: queue.SimpleQueue[logging.LogRecord | threading.Event | None] = queue.SimpleQueue()
        self._is_closed = False
        self.addFilter(note_span)
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
        """Write a record. Whatever that raises, the next one is tried."""
        try:
            self._target.handle(record)
        except Exception:  # noqa: BLE001  Python's handlers catch most, but not that a file cannot be opened again
            self._target.handleError(record)


def _finished(record: logging.LogRecord) -> logging.LogRecord:
    """A record that does not change any more, whatever happens to the arguments of its message."""
    if isinstance(record.msg, Line):
        return record
    copied = copy.copy(record)
    copied.msg, copied.args = record.getMessage(), None
    if record.exc_info:
        copied.exc_text = record.exc_text or _TRACEBACKS.formatException(record.exc_info)
        copied.exc_info = None
    return copied
