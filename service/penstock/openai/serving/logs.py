"""The log of the front, which goes to stderr."""

from __future__ import annotations

import logging
from typing import Final

from penstock.shared.logs import JsonLines, LogFormat, OneLine, QueuedLog, stderr_handler

_QUIET: Final = {"asyncio": logging.WARNING, "uvicorn.error": logging.ERROR}
"""Libraries whose lines below this level say nothing to operators; uvicorn warns of each peer that speaks no
HTTP.
"""


def open_logs(log_format: LogFormat) -> None:
    """Send all that is logged in this process to stderr, in this format."""
    target = stderr_handler()
    target.setFormatter(JsonLines() if log_format == "json" else OneLine())
    logging.basicConfig(handlers=[QueuedLog(target)], level=logging.INFO, force=True)
    logging.captureWarnings(True)
    for name, level in _QUIET.items():
        logging.getLogger(name).setLevel(level)
