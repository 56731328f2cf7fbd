"""Hands the scheduler's outputs to the sinks of their requests, and notes in the journal which outputs begin
and end. No jax.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from penstock.runtime.loop.interface import Sink
from penstock.runtime.loop.recording import Recording
from penstock.runtime.requests.request import StepOutput
from penstock.runtime.scheduling.sequence import Sequence as ScheduledSequence

log = logging.getLogger(__name__)


class Delivery:
    """Any thread may post outputs; one thread, the engine's, hands them over, in order. All methods but
    `deliver` and `hand_over` are called with the engine's lock held.
    """

    def __init__(self, changed: threading.Condition, recording: Recording) -> None:
        """`changed` is a condition over the engine's lock; it is notified when a delivery has ended."""
        self._changed = changed
        self._recording = recording
        self._readers: dict[str, tuple[Sink, ScheduledSequence]] = {}
        """Id to sink and sequence, for every output that has not ended."""
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

    def attach(self, seq: ScheduledSequence, sink: Sink) -> None:
        """Sends the outputs of this sequence, which was queued, to `sink`, up to the last one."""
        self._readers[seq.request_id] = sink, seq
        self._recording.queued(seq.request)

    def detach(self, request_id: str) -> None:
        """Drops all further outputs of this request, because nobody reads them."""
        reader = self._readers.pop(request_id, None)
        if reader is not None:
            _, seq = reader
            self._recording.cancelled(seq.request, seq.timing(time.monotonic_ns()), seq.num_generated)

    def post(self, outputs: Sequence[StepOutput]) -> None:
        """Posts outputs, except those of detached requests."""
        readers = self._readers
        for output in outputs:
            reader = readers.get(output.request_id)
            if reader is None:
                continue
            sink, seq = reader
            self._outbox.append((sink, output))
            if output.last:
                del readers[output.request_id]
                self._recording.ended(seq.request, output, seq.num_generated)

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
        readers, self._readers = self._readers, {}
        self._delivering = True
        now_ns = time.monotonic_ns()
        for sink, seq in readers.values():
            output = StepOutput(seq.request_id, error=error, timing=seq.timing(now_ns))
            outbox.append((sink, output))
            self._recording.ended(seq.request, output, seq.num_generated)
        return outbox

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
