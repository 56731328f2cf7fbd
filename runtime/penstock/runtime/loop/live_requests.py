"""The engine's requests, from the queue to their last output. No jax."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence

from penstock.runtime.loop.delivery import Delivery
from penstock.runtime.loop.interface import AbortOutcome, Sink
from penstock.runtime.requests.request import Finish, FinishReason
from penstock.runtime.scheduling.scheduler import Scheduler
from penstock.runtime.scheduling.sequence import Sequence as ScheduledSequence


class LiveRequests:
    """Keeps the scheduler and the delivery together: each request that ends gets a last output, or none if
    nobody reads it. Every method but `cancel` and `has_cancelled` is called with the engine's lock held.
    """

    def __init__(self, scheduler: Scheduler, delivery: Delivery, changed: threading.Condition) -> None:
        """`changed` is notified when requests were dropped."""
        self._scheduler = scheduler
        self._delivery = delivery
        self._changed = changed
        self._cancelled: deque[tuple[str, ...]] = deque()

    @property
    def has_cancelled(self) -> bool:
        """Whether `drop_cancelled` has something to do. May be asked without the lock."""
        return bool(self._cancelled)

    def cancel(self, request_ids: tuple[str, ...]) -> None:
        """Notes, without the lock, that nobody reads these requests any more. Whoever takes the lock next to
        look at the scheduler drops them first.
        """
        self._cancelled.append(request_ids)

    def drop_cancelled(self) -> None:
        """Frees the slots and pages of cancelled requests; their sinks are told nothing."""
        while self._cancelled:
            for request_id in self._cancelled.popleft():
                self._delivery.detach(request_id)
                self._scheduler.abort(request_id, "", time.monotonic_ns())
            self._changed.notify_all()

    def forget_cancelled(self) -> None:
        """Drops the notes of cancelled requests, because the engine is dead."""
        self._cancelled.clear()

    def queue(self, seq: ScheduledSequence, sink: Sink) -> None:
        """Queues a request whose outputs go to `sink`. Raises DuplicateRequestId or QueueFull."""
        self._scheduler.queue(seq)
        self._delivery.attach(seq, sink)

    def end(self, request_id: str, finish: Finish) -> bool:
        """Ends the output with this id of the engine's, with a last output for its sink. False if it is not
        active.
        """
        output = self._scheduler.abort(
            request_id, finish.message, time.monotonic_ns(), reason=finish.reason, stop=finish.stop
        )
        if output is None:
            return False
        self._delivery.post([output])
        return True

    def end_all(self, request_ids: Iterable[str], message: str) -> None:
        """Ends the outputs with these ids of the engine's, as ABORTED."""
        for request_id in request_ids:
            self.end(request_id, Finish(FinishReason.ABORTED, message=message))

    def fail_all(self, error: Exception) -> None:
        """Ends all outputs with an error."""
        now_ns = time.monotonic_ns()
        self._delivery.post(
            [self._scheduler.fail(name, error, now_ns) for name in self._scheduler.active_ids()]
        )

    def abort(self, request_ids: Iterable[str], message: str) -> list[tuple[str, AbortOutcome]]:
        """Ends requests with all their outputs. Returns the outcome for each id, in the order given,
        duplicates once.
        """
        return [(request_id, self._abort(request_id, message)) for request_id in dict.fromkeys(request_ids)]

    def _abort(self, request_id: str, message: str) -> AbortOutcome:
        finish = Finish(FinishReason.ABORTED, message=message)
        ended = [self.end(output, finish) for output in self._scheduler.outputs_of(request_id)]
        if any(ended):
            return AbortOutcome.ABORTED
        if self._scheduler.finished(request_id):
            return AbortOutcome.ALREADY_FINISHED
        return AbortOutcome.NOT_FOUND

    def matching(self, prefix: str) -> Sequence[str]:
        """The ids of the active requests that begin with `prefix`, in order of arrival."""
        return [
            request_id for request_id in self._scheduler.active_requests() if request_id.startswith(prefix)
        ]
