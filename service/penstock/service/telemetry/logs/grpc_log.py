"""Keeps lines of gRPC and OpenTelemetry out of the log that say nothing, or that quote what a peer sent."""

from __future__ import annotations

import logging

import grpc

LOGGER = "grpc._cython.cygrpc"
TRACE_LOGGER = "opentelemetry.trace.span"
"""Warns of each `tracestate` header that it cannot read, and quotes it."""
_GONE = 'Failed "execute_batch"'
"""The beginning of the error of a send that gRPC's core began and could not finish, because the client is
gone. A send that could not even begin has another error, which is logged.
"""
_CORE_GONE = "ExecuteBatchError raised in core"
"""The error of such a send if gRPC notices that sending failed before it notices that the client
cancelled.
"""
_NOT_TEXT = "Invalid encoding on"
"""Begins the line about metadata that are not UTF-8, which quotes them and may so reveal a key. The call goes
on with the bytes.
"""


def says_something(record: logging.LogRecord) -> bool:
    """Say whether gRPC's record is worth a line in the log."""
    if str(record.msg).startswith(_NOT_TEXT):
        return False
    kind, error = (record.exc_info or (None, None))[:2]
    if isinstance(error, grpc.aio.InternalError) and str(error).startswith(_GONE):
        return False
    is_lost = kind is not None and kind.__name__ == "ExecuteBatchError"
    return not (is_lost and record.getMessage().startswith(_CORE_GONE))


def is_severe(record: logging.LogRecord) -> bool:
    """Say whether OpenTelemetry's record is worth a line in the log."""
    return record.levelno >= logging.ERROR


def hush() -> None:
    """Filter these lines from now on, in the whole process. May be called more than once."""
    logging.getLogger(LOGGER).addFilter(says_something)
    logging.getLogger(TRACE_LOGGER).addFilter(is_severe)
