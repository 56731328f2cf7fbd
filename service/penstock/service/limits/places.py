"""Counts places in the engine's queue from the arrival of a request, before the engine has it.

Between the two the prompt is tokenized and the grammar compiled. Without counting requests in that state
there could be any number of them, and most would be refused only after that work was done.
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
        """Outputs of requests that are being prepared for the engine."""
        return self._preparing

    @contextlib.contextmanager
    def taken(self, outputs: int) -> Iterator[None]:
        """Hold places for the outputs of one request while the context is open; at its end the engine must
        have them all.

        Raises QueueFull at once, with the time to come back, if the queue cannot take them, or inside, if the
        engine refuses them. An engine that takes no requests at all gives its own reason.
        """
        if self._engine.ready:
            load, config = self._engine.load(), self._engine.config
            rows = max(config.max_num_seqs - load.num_running, 0)
            coming = load.num_waiting + self._preparing
            # Outputs that are being prepared may still find a free row; those that wait in the engine found
            # none.
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
        """Count these outputs as ended, in whichever way, so that others have room."""
        self._pace.left(outputs)

    def _refusal(self, outputs: int, limit: int) -> QueueFull:
        return QueueFull(limit, self._pace.retry_after_s(outputs))
