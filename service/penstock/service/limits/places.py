"""Places in the engine's queue, counted from when a request comes and not only from when the engine has it.

Between the two its prompt is tokenized and its grammar compiled. Without counting those, any number of
requests could be in that state, and all but a queue's length of them would be refused after the work is done.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from penstock.runtime.errors import QueueFull
from penstock.service.backend import Backend
from penstock.service.limits.pace import Pace


class Places:
    """The queue of one engine as its callers see it. Used on the event loop only."""

    def __init__(self, engine: Backend, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._pace = Pace(clock)
        self._preparing = 0

    @property
    def preparing(self) -> int:
        """Outputs of requests that are on their way into the engine."""
        return self._preparing

    @contextlib.contextmanager
    def taken(self, outputs: int) -> Iterator[None]:
        """Has places for so many outputs of one request inside, which ends with all of them in the engine.

        Raises QueueFull at once where the queue could not take them, with the time to come back; so does the
        engine inside. An engine that takes no requests at all says why by itself.
        """
        if self._engine.ready:
            load, config = self._engine.load(), self._engine.config
            rows = max(config.max_num_seqs - load.num_running, 0)
            coming = load.num_waiting + self._preparing
            # Those that are being prepared may find a free row; those that wait already have none.
            free = config.max_queued_requests - load.num_waiting
            if outputs > free or coming + outputs > config.max_queued_requests + rows:
                raise self._refusal(outputs, config.max_queued_requests)
        self._preparing += outputs
        try:
            yield
        except QueueFull as error:
            raise self._refusal(outputs, error.limit) from None
        finally:
            self._preparing -= outputs
        self._pace.entered(outputs)

    def left(self, outputs: int) -> None:
        """So many outputs ended, in whichever way, and make room for others."""
        self._pace.left(outputs)

    def _refusal(self, outputs: int, limit: int) -> QueueFull:
        return QueueFull(limit, self._pace.retry_after_s(outputs))
