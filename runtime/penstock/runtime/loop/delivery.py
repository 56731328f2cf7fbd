"""Who is told what: the way from a scheduler's outputs to the requests' sinks. No jax."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from penstock.runtime.loop.interface import Sink
from penstock.runtime.requests.request import Output

log = logging.getLogger(__name__)


class Delivery:
    """Outputs are lined up by any thread and handed over by one, in order. All methods but `deliver` and
    `hand_over` are to be called with the engine's lock held.
    """

    def __init__(self, changed: threading.Condition) -> None:
        """`changed` is over the engine's lock, and told when a delivery has ended."""
        self._changed = changed
        self._sinks: dict[str, Sink] = {}
        self._outbox: list[tuple[Sink, Output]] = []
        self._delivering = False

    @property
    def is_pending(self) -> bool:
        """Whether something is lined up."""
        return bool(self._outbox)

    @property
    def is_done(self) -> bool:
        """Whether all that was lined up was taken by its sink."""
        return not (self._outbox or self._delivering)

    def attach(self, request_id: str, sink: Sink) -> None:
        """Outputs of this request go to `sink`, up to its last one."""
        self._sinks[request_id] = sink

    def detach(self, request_id: str) -> None:
        """Nothing more is lined up for this request."""
        self._sinks.pop(request_id, None)

    def post(self, outputs: Sequence[Output]) -> None:
        """Line up outputs, dropping those of detached requests."""
        for output in outputs:
            sinks = self._sinks
            sink = sinks.pop(output.request_id, None) if output.last else sinks.get(output.request_id)
            if sink is not None:
                self._outbox.append((sink, output))

    def deliver(self) -> None:
        """One call per sink for everything that is lined up; on the engine's thread, without the lock."""
        with self._changed:
            outbox, self._outbox = self._outbox, []
            self._delivering = True
        self.hand_over(outbox)

    def fail(self, error: Exception) -> list[tuple[Sink, Output]]:
        """What is lined up, and then a last output with `error` for everybody who had none: for `hand_over`,
        and nothing is done before that has been.
        """
        outbox, self._outbox = self._outbox, []
        sinks, self._sinks = self._sinks, {}
        self._delivering = True
        return outbox + [(sink, Output(request_id, error=error)) for request_id, sink in sinks.items()]

    def hand_over(self, outbox: Sequence[tuple[Sink, Output]]) -> None:
        """One call per sink for all of these; on the engine's thread, without the lock."""
        try:
            by_sink: dict[int, tuple[Sink, list[Output]]] = {}
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
