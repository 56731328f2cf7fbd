"""One output that is being generated: from what the engine's steps made of it to what its reader gets.

`LiveOutput` makes its deltas. `Switchboard` carries what the steps made from the engine's thread to an event
loop, with one wake-up of the loop for each step, however many requests it serves: the engine calls each
output's sink in turn; a sink only appends to the switchboard's queue, and the first one of a step wakes the
loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.runtime.prompting.interface import RequestQueue
from penstock.runtime.requests.request import StepOutput
from penstock.runtime.text.assembler import Assembler, Delta

MAX_TURN_S = 0.001
"""For so long outputs are taken in before others on the event loop have a turn."""


class LiveOutput:
    """Makes deltas of one output, and ends the output in the engine when a stop string was found.

    It is used by one thread at a time.
    """

    def __init__(
        self,
        queue: RequestQueue,
        request_id: str,
        assembler: Assembler,
        *,
        holds_id: Callable[[], bool] = lambda: True,
    ) -> None:
        """`request_id` is the engine's, of this output. `holds_id` says whether the engine still knows this
        output by it: once another request has taken the id, that one must not be ended.
        """
        self.request_id = request_id
        self._queue = queue
        self._assembler = assembler
        self._holds_id = holds_id
        self._told_stop = False
        self.has_ended = False
        """Whether the engine has no more of it."""

    def add(self, output: StepOutput) -> Delta:
        """Return what a step added. Raises the error that the output ended with, and what its parsing
        raises.
        """
        self.has_ended = output.last
        delta = self._assembler.add(output)
        if self._assembler.stop is not None and not self.has_ended and not self._told_stop:
            self._told_stop = True
            if self._holds_id():
                self._queue.finish(self.request_id, self._assembler.stop)
        return delta


class Receiver(Protocol):
    """Who takes in what the steps make of one output, on the event loop."""

    def deliver(self, output: StepOutput) -> None:
        """Take in what one step made. It must raise nothing: an error would reach the other receivers."""
        ...


class Switchboard:
    """Carries outputs from the engine's thread to receivers on one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._queue: deque[tuple[Receiver, Sequence[StepOutput]]] = deque()
        self._awake = False

    def post(self, receiver: Receiver, outputs: Sequence[StepOutput]) -> None:
        """Post outputs on the engine's thread. Appending before the check means that nothing is left behind
        asleep.
        """
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
