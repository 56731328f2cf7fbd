"""Bounds how long a message may take to arrive, and how many messages may be arriving for longer than a
moment.

gRPC holds a message in memory until its last byte has arrived. Most messages are complete when their call is
looked at, and wait for nothing here. A message that is not complete a moment later needs a place, of which
there are few. So a client that sends the first megabytes of thousands of messages, and never the rest, takes
the memory of only a few, and does not keep others from sending theirs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from penstock.service.errors import Busy, StalledSender
from penstock.service.limits.admission import Clock, Gate, Kind

T = TypeVar("T")
MOMENT_S = 0.5
"""Within this many seconds a message has arrived, unless it is large, the network is slow, or it is never
sent.
"""
_WORK = (Kind.WORK, Kind.TOKENIZE)


class Receiving:
    """The places of one server. Used on its event loop only."""

    def __init__(
        self,
        most: int,
        limit_s: float,
        clock: Clock = time.monotonic,
        *,
        update_limit_s: float = 0.0,
    ) -> None:
        """`most` messages of work may take longer than a moment at once, of which one address may have half;
        the other kinds have a few places each. 0 means any number. `limit_s` is how long one message may
        take, in seconds, and `update_limit_s` how long each message of an UpdateWeights may; 0 means for
        ever.
        """
        self._limits_s = dict.fromkeys(Kind, limit_s) | {Kind.UPDATE: update_limit_s}
        few = most and max(most // 8, 2)
        work = _gate(most, clock)
        self._gates = {kind: work if kind in _WORK else _gate(few, clock) for kind in Kind}

    def active(self, kind: Kind) -> int:
        """How many messages of the kind have a place."""
        return self._gates[kind].active

    async def message(self, kind: Kind, peer: str, read: Callable[[], Awaitable[T]]) -> T:
        """Return what `read()` returns. `peer` is gRPC's name of the peer. Raises StalledSender if it takes
        too long, and Busy if too many messages do.
        """
        loop, limit_s = asyncio.get_running_loop(), self._limits_s[kind]
        refusal: Busy | None = None
        leave: Callable[[], None] | None = None

        def take_place() -> None:
            nonlocal refusal, leave
            try:
                leave = self._gates[kind].enter(peer)
            except Busy as error:
                refusal = error
                deadline.reschedule(loop.time())

        timer = loop.call_later(MOMENT_S, take_place)
        try:
            async with asyncio.timeout(limit_s or None) as deadline:
                return await read()
        except TimeoutError:
            raise refusal or StalledSender(limit_s) from None
        finally:
            timer.cancel()
            if leave is not None:
                leave()
            refusal = None  # its traceback refers to this frame


def _gate(most: int, clock: Clock) -> Gate:
    return Gate("max_receiving_rpcs", most, clock, per_address=(most + 1) // 2)
