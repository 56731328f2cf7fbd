"""Sends one batch after the other, and tries a batch again as OTLP's rules allow."""

from __future__ import annotations

import random
import threading
import time

from penstock.service.telemetry.otlp.destination import Destination
from penstock.service.telemetry.otlp.grpc_transport import GrpcTransport
from penstock.service.telemetry.otlp.http_transport import HttpTransport
from penstock.service.telemetry.otlp.transport import Failed, Taken, Transport

_FIRST_PAUSE_S = 1.0
_MOST_SILENCE_S = 30.0
"""How long a collector that asks for more time than a batch has is left alone, at most."""


class Sender:
    """Sends the batches of one thread. Every wait in it can be ended by another."""

    def __init__(self, transport: Transport, timeout_s: float) -> None:
        """`timeout_s` is how long one batch may take, with all attempts."""
        self._transport = transport
        self._timeout_s = timeout_s
        self._hurried = threading.Event()
        self._end_s = float("inf")
        self._silent_until_s = 0.0

    def send(self, batch: bytes) -> Taken | Failed:
        """Send a batch. Raises nothing."""
        self._hurried.wait(max(0.0, self._silent_until_s - time.monotonic()))
        until_s = time.monotonic() + self._timeout_s
        pause_s = _FIRST_PAUSE_S
        while True:
            left_s = min(until_s, self._end_s) - time.monotonic()
            if left_s <= 0:
                return Failed("no time is left")
            is_last = self._hurried.is_set()
            answer = self._transport.attempt(batch, left_s)
            if isinstance(answer, Taken) or not answer.may_retry or is_last:
                return answer
            wait_s = answer.retry_after_s
            if wait_s is None:
                wait_s = pause_s * random.uniform(0.8, 1.2)  # so that not all servers come back at once
            if time.monotonic() + wait_s >= until_s:
                if answer.retry_after_s is not None:
                    self._silent_until_s = time.monotonic() + min(wait_s, _MOST_SILENCE_S)
                return answer
            self._hurried.wait(wait_s)
            pause_s *= 2

    def hurry(self, within_s: float) -> None:
        """Wait for nothing from now on, try each batch once more, and end the last attempt within this time.
        From any thread.
        """
        self._end_s = time.monotonic() + within_s
        self._hurried.set()

    def close(self) -> None:
        """End for good, also an attempt that is under way. From any thread."""
        self.hurry(0.0)
        self._transport.close()


def sender_to(destination: Destination) -> Sender:
    """Make a sender to this collector. Raises ConfigError for a bad certificate."""
    transport = GrpcTransport(destination) if destination.protocol == "grpc" else HttpTransport(destination)
    return Sender(transport, destination.timeout_s)
