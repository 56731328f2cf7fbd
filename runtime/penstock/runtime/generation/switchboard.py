"""From the engine's thread to an event loop: one wake-up of the loop for each step, however many requests it
serves.

The engine calls each output's sink in turn; a sink only appends to the switchboard's queue, and the first one
of a step wakes the loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from penstock.runtime.requests.request import StepOutput

MAX_TURN_S = 0.001
"""For so long outputs are taken in before others on the event loop have a turn."""


class Receiver(Protocol):
    """Who takes in what the steps make of one output, on the event loop."""

    def deliver(self, output: StepOutput) -> None:
        """Takes in what one step made. It must raise nothing: an error would reach the other receivers."""
        ...


class Switchboard:
    """Carries outputs from the engine's thread to receivers on one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._queue: deque[tuple[Receiver, Sequence[StepOutput]]] = deque()
        self._awake = False

    def post(self, receiver: Receiver, outputs: Sequence[StepOutput]) -> None:
        """On the engine's thread. Appending before the check means that nothing is left behind asleep."""
        self._queue.append((receiver, outputs))
        if not self._awake:
            self._awake = True
            try:
                self.loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop is closed: its program has ended and nobody reads
                self._queue.clear()

    def _deliver(self) -> None:
        until = time.monotonic() + MAX_TURN_S
        self._awake = False
        for _ in range(len(self._queue)):
            receiver, outputs = self._queue.popleft()
            for output in outputs:
                receiver.deliver(output)
            if self._queue and time.monotonic() > until:
                self._awake = True
                self.loop.call_soon(self._deliver)
                return
