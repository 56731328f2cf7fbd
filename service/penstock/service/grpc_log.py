"""What gRPC logs and nobody needs to know."""

from __future__ import annotations

import logging

import grpc

LOGGER = "grpc._cython.cygrpc"
_GONE = 'Failed "execute_batch"'
"""What a send is called that gRPC's core began and could not finish, because the client is gone. One that it
could not even begin is another matter, and has other words.
"""


def _says_something(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not (isinstance(error, grpc.aio.InternalError) and str(error).startswith(_GONE))


def hush() -> None:
    """Keep gRPC from logging an error with a traceback whenever a client hangs up while it is answered."""
    logging.getLogger(LOGGER).addFilter(_says_something)
