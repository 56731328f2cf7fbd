"""A bound on lines of the log that may come by the thousands: so many a second are written, and the others
counted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextvars import Context

from penstock.shared.logs import Line


class LineBudget:
    """A token bucket that allows `per_second` lines a second on average, and as many at once."""

    def __init__(self, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds."""
        self._most = self._tokens = per_second
        self._clock = clock
        self._at = clock()

    def take(self) -> bool:
        """Say whether a line may be written now; count it if so."""
        now = self._clock()
        self._tokens = min(self._most, self._tokens + (now - self._at) * self._most)
        self._at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


class BoundedLog:
    """Writes lines of one kind at the level INFO, while their budget lasts. Used on the event loop only."""

    def __init__(
        self,
        logger: logging.Logger,
        per_second: float,
        left_out: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`left_out` is the message, with one %d, that says how many lines were not written."""
        self._logger = logger
        self._budget = LineBudget(per_second, clock)
        self._message = left_out
        self._num_left_out = 0

    @property
    def is_on(self) -> bool:
        """Whether the operator wants such lines at all."""
        return self._logger.isEnabledFor(logging.INFO)

    def write(self, line: Line) -> None:
        """Write the line, or only count it if there were too many."""
        if self._budget.take():
            self._logger.info(line)
            return
        if not self._num_left_out:
            # In a context of its own, because that line belongs to no call's trace.
            asyncio.get_running_loop().call_later(1.0, self._tell_left_out, context=Context())
        self._num_left_out += 1

    def _tell_left_out(self) -> None:
        self._logger.info(self._message, self._num_left_out)
        self._num_left_out = 0
