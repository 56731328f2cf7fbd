"""What gRPC and OpenTelemetry log and nobody needs to know, or may: what a peer sent, word for word."""

from __future__ import annotations

import logging

import grpc

LOGGER = "grpc._cython.cygrpc"
TRACE_LOGGER = "opentelemetry.trace.span"
"""Warns of each `tracestate` that it cannot read, and quotes it."""
_GONE = 'Failed "execute_batch"'
"""What a send is called that gRPC's core began and could not finish, because the client is gone. One that it
could not even begin is another matter, and has other words.
"""
_CORE_GONE = "ExecuteBatchError raised in core"
"""The same, where gRPC hears that the sending failed before it hears that the client cancelled."""
_NOT_TEXT = "Invalid encoding on"
"""Of metadata that are not UTF-8. The line quotes them, so also a key. The call goes on with the bytes."""


def says_something(record: logging.LogRecord) -> bool:
    """Whether gRPC's record is written."""
    if str(record.msg).startswith(_NOT_TEXT):
        return False
    kind, error = (record.exc_info or (None, None))[:2]
    if isinstance(error, grpc.aio.InternalError) and str(error).startswith(_GONE):
        return False
    is_lost = kind is not None and kind.__name__ == "ExecuteBatchError"
    return not (is_lost and record.getMessage().startswith(_CORE_GONE))


def is_severe(record: logging.LogRecord) -> bool:
    """Whether OpenTelemetry's record is written."""
    return record.levelno >= logging.ERROR


def hush() -> None:
    """From now on, for the whole process. More than once is as good as once."""
    logging.getLogger(LOGGER).addFilter(says_something)
    logging.getLogger(TRACE_LOGGER).addFilter(is_severe)
