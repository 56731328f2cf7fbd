"""Decides whether and when a call is tried again, and how much time is left for it."""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass

from penstock.client.errors import (
    DuplicateRequestId,
    PenstockClientError,
    UnavailableError,
    Unreachable,
    UpdateUnderWay,
)


@dataclass(frozen=True, slots=True)
class Retry:
    """Repeats calls that the server could not take: those that fail with an UnavailableError, and no others.

    A call is repeated only before the first message of its answer has come, so nobody reads a part of it
    twice. The wait before attempt n + 1 is what the server asks for (`retry_after`), and in addition a random
    part of `initial_delay` * 2 ** (n - 1) seconds, at most `max_delay`, so that callers who were refused
    together do not come back together.

    If a connection breaks, the request may have reached the server, which ends it when it notices. Until then
    its id is taken, so after a broken connection DuplicateRequestId is retried, too. What the lost attempt
    computed is lost. In the same way a weight update finds its own lost attempt under way, so UpdateUnderWay
    is retried then. An update is sent again under its id, so it is never applied twice.
    """

    attempts: int = 5
    """The most attempts, including the first."""
    initial_delay: float = 0.5
    """Seconds."""
    max_delay: float = 30.0
    """Seconds. If the server asks for a longer wait, the call is not repeated."""

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ValueError(f"attempts must be at least 1, not {self.attempts}")
        if not (math.isfinite(self.initial_delay) and self.initial_delay > 0):
            raise ValueError(f"initial_delay must be above 0 seconds, not {self.initial_delay}")
        if not (math.isfinite(self.max_delay) and self.max_delay >= self.initial_delay):
            raise ValueError(f"max_delay must be at least initial_delay, not {self.max_delay}")


class Attempts:
    """The attempts at one call. All of them and their waits share one `timeout`, in seconds."""

    def __init__(self, retry: Retry | None, timeout: float | None) -> None:
        self._retry = retry or Retry(attempts=1)
        self._made = 0
        self._may_have_arrived = False
        self._deadline = None if timeout is None else time.monotonic() + timeout

    def timeout(self) -> float | None:
        """Seconds that the next attempt may take; None means no limit."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def delay_after(self, error: PenstockClientError) -> float | None:
        """Seconds to wait before the next attempt; None if the error is final."""
        self._made += 1
        again = isinstance(error, UnavailableError) or (
            isinstance(error, DuplicateRequestId | UpdateUnderWay) and self._may_have_arrived
        )
        self._may_have_arrived |= isinstance(error, Unreachable)
        asked = error.retry_after or 0.0
        if not again or self._made >= self._retry.attempts or asked > self._retry.max_delay:
            return None
        most = min(self._retry.max_delay, self._retry.initial_delay * 2 ** min(self._made - 1, 60))
        delay = asked + random.uniform(0, most)
        left = self.timeout()
        return delay if left is None or delay < left else None
