"""Limits how fast, and how much at once, one caller may use the server: token buckets and a count.

A bucket holds what a minute allows and is filled evenly. So a caller that was away for a minute may use a
minute's worth at once, and in the long run no caller gets more than its rate. A request takes one from the
bucket of requests when it comes. Tokens are known only as they are generated: a request begins if the bucket
of tokens holds any, and takes out its tokens as they are used, even below zero. A running request is never
cut off; the next request waits until the debt is paid, so the average is exact. All requests that begin while
the bucket holds something may overdraw it together; only max_parallel_requests bounds how many those are.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from penstock.service.access_errors import RateLimited
from penstock.service.errors import Busy
from penstock.service.limits.admission import Pace

Clock = Callable[[], float]
_ENOUGH = 0.99
"""Slightly less than one request or token, so that a caller that waits exactly `wait_s` is not refused
because of rounding.
"""


class TokenBucket:
    """What is left of a rate. Used on the event loop only."""

    def __init__(self, per_minute: int, clock: Clock) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._filled_at = clock()

    def level(self) -> float:
        """Return what may be taken now; below 0 it is a debt."""
        now = self._clock()
        gained = (now - self._filled_at) * self.per_minute / 60.0
        self._level = min(self._level + gained, float(self.per_minute))
        self._filled_at = now
        return self._level

    def wait_s(self) -> float:
        """Return the seconds until one may be taken; 0 if one may be taken now."""
        level = self.level()
        return 0.0 if level >= _ENOUGH else (1.0 - level) * 60.0 / self.per_minute

    def take(self, count: int) -> None:
        """Take `count`, whatever the level is."""
        self._level = self.level() - count

    def change_rate(self, per_minute: int) -> None:
        """Use another rate from now on. What was used of the old rate is taken from the new one."""
        used = self.per_minute - self.level()
        self.per_minute = per_minute
        self._level = per_minute - used


@dataclass(frozen=True, slots=True)
class Rates:
    """The limits of one caller; None means no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_parallel_requests: int | None = None


class Account:
    """What one caller has used. It survives reloads of the file of keys."""

    def __init__(self, rates: Rates, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._requests: TokenBucket | None = None
        self._tokens: TokenBucket | None = None
        self._max_parallel: int | None = None
        self._pace = Pace(clock)
        self.change(rates)

    @property
    def num_running(self) -> int:
        """How many admitted requests have not ended."""
        return self._pace.active

    def change(self, rates: Rates) -> None:
        """Use other limits from now on."""
        self._requests = self._changed(self._requests, rates.requests_per_minute)
        self._tokens = self._changed(self._tokens, rates.tokens_per_minute)
        self._max_parallel = rates.max_parallel_requests

    def _changed(self, bucket: TokenBucket | None, per_minute: int | None) -> TokenBucket | None:
        if per_minute is None:
            return None
        if bucket is None:
            return TokenBucket(per_minute, self._clock)
        if bucket.per_minute != per_minute:
            bucket.change_rate(per_minute)
        return bucket

    def admit(self) -> None:
        """Count one more request; `leave` must be called when it ends. Raises Busy, or RateLimited with the
        time until there is room; nothing is counted then.
        """
        most = self._max_parallel
        if most is not None and self.num_running >= most:
            raise Busy("max_parallel_requests", most, self._pace.retry_after_s())
        short = [
            RateLimited(name, bucket.per_minute, wait_s)
            for name, bucket in (("requests_per_minute", self._requests), ("tokens_per_minute", self._tokens))
            if bucket is not None and (wait_s := bucket.wait_s()) > 0.0
        ]
        if short:  # after the longer time there is room in both buckets
            raise max(short, key=lambda error: error.retry_after_s)
        if self._requests is not None:
            self._requests.take(1)
        self._pace.entered()

    def leave(self) -> None:
        """Count an admitted request as ended."""
        self._pace.left()

    def use_tokens(self, count: int) -> None:
        """Count `count` tokens of a prompt or an output as used."""
        if self._tokens is not None and count:
            self._tokens.take(count)
