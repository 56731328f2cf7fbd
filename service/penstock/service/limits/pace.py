"""Measures how fast work gets done, and tells refused callers when it is worth trying again."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

WINDOW_S = 30.0
"""Ends that are older than about this many seconds count for little."""
SHORTEST_S = 1.0
"""The shortest time, in seconds, that a rate is computed over."""
UNKNOWN_S = 1.0
"""Seconds to wait while no work has ended yet."""
MIN_RETRY_S, MAX_RETRY_S = 0.1, 60.0


class Pace:
    """Counts what is under way and how much of it ends per second, and tells refused callers when to come
    back.

    Only time with something under way counts, because an idle night says nothing about the speed of the
    morning. Older ends weigh less, by exp(-age / WINDOW_S). Not for use on several threads.
    """

    __slots__ = ("_active", "_at", "_clock", "_ended", "_promised", "_span_s")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds and never goes back."""
        self._clock = clock
        self._active = 0
        self._at = clock()
        self._ended = 0.0
        self._span_s = 0.0
        self._promised = self._at
        """Until this time every place that becomes free is promised to a refused caller."""

    @property
    def active(self) -> int:
        """How much is under way."""
        return self._active

    def entered(self, count: int = 1) -> None:
        """Count `count` more as under way."""
        self._advance()
        self._active += count

    def left(self, count: int = 1) -> None:
        """Count `count` of them as ended, in whichever way they ended."""
        self._advance()
        self._active -= count
        self._ended += count

    def per_second(self) -> float | None:
        """How many end per second, or None if none has ended yet."""
        self._advance()
        return self._ended / max(self._span_s, SHORTEST_S) if self._ended else None

    def retry_after_s(self, places: int = 1) -> float:
        """In how many seconds `places` places should be free for a caller that is refused now.

        Callers that are refused one after the other get later and later times, so that they do not all come
        back for the same place. None gets a time after all work that is under way now should have ended: a
        flood of refusals must not send honest callers away for longer than that.
        """
        rate, now = self.per_second(), self._at
        if not rate:
            return UNKNOWN_S
        latest = now + max(self._active, places) / rate
        self._promised = min(max(self._promised, now) + places / rate, latest)
        return min(max(self._promised - now, MIN_RETRY_S), MAX_RETRY_S)

    def _advance(self) -> None:
        now = self._clock()
        if self._active > 0:
            kept = math.exp((self._at - now) / WINDOW_S)
            self._ended *= kept
            self._span_s = self._span_s * kept + WINDOW_S * (1 - kept)
        self._at = now
