"""Where the server's log goes, by its operator's options; `open_logs` sets it up for the whole process."""

from __future__ import annotations

import logging
import logging.handlers
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, get_args

from penstock.runtime.errors import ConfigError
from penstock.service.telemetry.logs.spans import ids_of, note_span
from penstock.shared.logs import LOG_FORMATS, JsonLines, LogFormat, OneLine, QueuedLog, stderr_handler

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


_QUIET = ("jax", "httpx", "asyncio", "filelock", "huggingface_hub", "transformers")
"""Libraries whose lines at the level INFO say nothing to operators."""


def open_logs(options: LogOptions) -> None:
    """Send all that is logged in this process where the options say. Raises ConfigError if the file cannot
    be written.
    """
    target = _target(options)
    target.setFormatter(JsonLines(ids_of) if options.log_format == "json" else OneLine(ids_of))
    queued = QueuedLog(target)
    queued.addFilter(note_span)
    logging.basicConfig(handlers=[queued], level=options.log_level.upper(), force=True)
    logging.captureWarnings(True)
    for noisy in _QUIET:
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _target(options: LogOptions) -> logging.Handler:
    path = options.log_file
    if path is None:
        return stderr_handler()
    try:
        if options.log_file_bytes:
            return logging.handlers.RotatingFileHandler(
                path,
                maxBytes=options.log_file_bytes,
                backupCount=options.log_file_count,
                encoding="utf-8",
                errors="backslashreplace",
            )
        return logging.handlers.WatchedFileHandler(path, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(f"log_file: {path} cannot be written: {error.strerror or error}") from error
