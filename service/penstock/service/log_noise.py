"""What gRPC logs as its own error and is everyday life: a client that went away before its reply had left."""

from __future__ import annotations

import logging

LOGGER = "grpc._cython.cygrpc"
_ERROR = "ExecuteBatchError"


class LostReplies(logging.Filter):
    """Drops the traceback that gRPC writes for each reply that it could not send; all else passes.

    gRPC hears that the sending failed before it hears that the client cancelled, and takes it for a bug then.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is written."""
        kind = record.exc_info[0] if record.exc_info else None
        is_lost = kind is not None and kind.__name__ == _ERROR
        return not (is_lost and record.getMessage().startswith(f"{_ERROR} raised in core"))

    def install(self) -> None:
        """From now on."""
        logging.getLogger(LOGGER).addFilter(self)

    def remove(self) -> None:
        """No more."""
        logging.getLogger(LOGGER).removeFilter(self)
