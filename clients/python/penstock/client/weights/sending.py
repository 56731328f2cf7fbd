"""Sends the messages of an update on a stream of the sync client. The call ends at once if the server answers
before it has all of them, or if a message cannot be made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Protocol

from penstock.client.weights.progress import Tracker
from penstock.client.weights.update import Step, Update, steps
from penstock.v1 import weights_pb2


class SyncCall(Protocol):
    """A running call of UpdateWeights in a sync client."""

    def add_done_callback(self, fn: Callable[[object], None]) -> None: ...
    def result(self) -> weights_pb2.UpdateWeightsResponse: ...
    def cancel(self) -> object: ...


def send(
    start: Callable[[Iterator[weights_pb2.UpdateWeightsRequest]], SyncCall], update: Update, chunk_bytes: int
) -> weights_pb2.UpdateWeightsResponse:
    """Send one attempt and return the answer. Raises grpc.RpcError, and whatever reading a tensor or the
    caller's progress function raises.

    gRPC asks for the messages in a thread of its own, one when it has sent the one before. What is raised
    there is raised here.
    """
    ended = threading.Event()
    failures: list[BaseException] = []
    with Tracker(update) as tracker:
        call = start(_fed(steps(update, chunk_bytes), tracker, failures, ended))
        try:
            call.add_done_callback(lambda _: ended.set())
            ended.wait()
            if failures:
                raise failures[0]
            return call.result()
        finally:
            call.cancel()  # does nothing to a call that has ended


def _fed(
    messages: Iterator[Step], tracker: Tracker, failures: list[BaseException], ended: threading.Event
) -> Iterator[weights_pb2.UpdateWeightsRequest]:
    """The messages alone. If one cannot be made the stream ends, so without a commit."""
    try:
        for message, num_bytes in messages:
            yield message
            tracker.add(num_bytes)
    except Exception as error:  # noqa: BLE001 - the caller's thread raises it
        failures.append(error)
        ended.set()
