"""Hands the scheduler's outputs to the sinks of their requests. No jax."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from penstock.runtime.loop.interface import Sink
from penstock.runtime.requests.request import StepOutput

log = logging.getLogger(__name__)


class Delivery:
    """Any thread may post outputs; one thread, the engine's, hands them over, in order. All methods but
    `deliver` and `hand_over` are called with the engine's lock held.
    """

    def __init__(self, changed: threading.Condition) -> None:
        """`changed` is a condition over the engine's lock; it is notified when a delivery has ended."""
        self._changed = changed
        self._sinks: dict[str, Sink] = {}
        self._outbox: list[tuple[Sink, StepOutput]] = []
        self._delivering = False

    @property
    def is_pending(self) -> bool:
        """Whether outputs are posted and not yet being handed over."""
        return bool(self._outbox)

    @property
    def is_done(self) -> bool:
        """Whether the sinks have taken all outputs that were posted."""
        return not (self._outbox or self._delivering)

    def attach(self, request_id: str, sink: Sink) -> None:
        """Sends the outputs of this request to `sink`, up to the last one."""
        self._sinks[request_id] = sink

    def detach(self, request_id: str) -> None:
        """Drops all further outputs of this request."""
        self._sinks.pop(request_id, None)

    def post(self, outputs: Sequence[StepOutput]) -> None:
        """Posts outputs, except those of detached requests."""
        for output in outputs:
            sinks = self._sinks
            sink = sinks.pop(output.request_id, None) if output.last else sinks.get(output.request_id)
            if sink is not None:
                self._outbox.append((sink, output))

    def deliver(self) -> None:
        """Hands over all posted outputs, in one call for each sink; on the engine's thread, without the
        lock.
        """
        with self._changed:
            outbox, self._outbox = self._outbox, []
            self._delivering = True
        self.hand_over(outbox)

    def fail(self, error: Exception) -> list[tuple[Sink, StepOutput]]:
        """Returns what is posted, followed by a last output with `error` for every request that had none, for
        `hand_over`. `is_done` stays false until that was called.
        """
        outbox, self._outbox = self._outbox, []
        sinks, self._sinks = self._sinks, {}
        self._delivering = True
        return outbox + [(sink, StepOutput(request_id, error=error)) for request_id, sink in sinks.items()]

    def hand_over(self, outbox: Sequence[tuple[Sink, StepOutput]]) -> None:
        """Hands over these outputs, in one call for each sink; on the engine's thread, without the lock."""
        try:
            by_sink: dict[int, tuple[Sink, list[StepOutput]]] = {}
            for sink, output in outbox:
                by_sink.setdefault(id(sink), (sink, []))[1].append(output)
            for sink, outputs in by_sink.values():
                try:
                    sink(outputs)
                except BaseException:  # one reader's fault must not end the others' requests
                    log.exception("a sink failed; its outputs are lost")
        finally:
            with self._changed:
                self._delivering = False
                self._changed.notify_all()  # drain waits for this
