"""Makes Unix times of monotonic ones, alike for all spans of a server."""

from __future__ import annotations

import time
from collections.abc import Callable

_SMALLEST_STEP_NS = 1_000_000
"""Reading both clocks takes some time, so a smaller difference means nothing."""


class WallClock:
    """Knows how far Unix time is ahead of the monotonic clock. That changes only when the machine's clock is
    set; spans that already began keep the difference that they began with.
    """

    def __init__(
        self,
        now_ns: Callable[[], int] = time.monotonic_ns,
        unix_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._now_ns, self._unix_ns = now_ns, unix_ns
        self.offset_ns = unix_ns() - now_ns()
        """Added to a monotonic time, it makes a Unix time. Any thread may read it."""

    def looked_at(self) -> int:
        """Compares the two clocks again, and returns the difference that counts from now on."""
        offset_ns = self._unix_ns() - self._now_ns()
        if abs(offset_ns - self.offset_ns) >= _SMALLEST_STEP_NS:
            self.offset_ns = offset_ns
        return self.offset_ns
