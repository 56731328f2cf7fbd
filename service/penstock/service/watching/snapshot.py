"""What a server's load was at one moment, for all who watch it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.service.backend import Backend
from penstock.service.watching.load_messages import report_of, request_status
from penstock.v1 import control_pb2


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The load at one moment, as parts of a message that every watcher gets."""

    report: bytes
    """A WatchLoadResponse without its requests."""
    requests: Sequence[bytes]
    """A WatchLoadResponse for each request, with nothing but that; the oldest first. Such serializations,
    joined, are one message."""

    def message(self, max_requests: int) -> bytes:
        """Make the message for a watcher who wants that many requests."""
        return b"".join((self.report, *self.requests[:max_requests]))


def look(engine: Backend, max_requests: int) -> Snapshot:
    """Ask the engine, and make the messages of its answers. Blocks for some milliseconds, but does not wait
    for the engine's thread, so that an engine that hangs can be watched, too.
    """
    metrics = engine.metrics(flush=False) if engine.config.metrics else None
    outputs = engine.oldest_outputs(max_requests) if max_requests else ()
    report = report_of(
        engine.load(),
        metrics,
        at_ns=time.time_ns(),
        is_paused=engine.is_paused,
        weights=engine.weights,
        adapters=engine.adapters.list(),
        max_running=engine.config.max_num_seqs,
    )
    now_ns = time.monotonic_ns()
    each = (control_pb2.WatchLoadResponse(requests=[request_status(one, now_ns)]) for one in outputs)
    return Snapshot(report.SerializeToString(), [message.SerializeToString() for message in each])
