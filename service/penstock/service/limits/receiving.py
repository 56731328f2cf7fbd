"""How long a message may be on its way in, and how many may be for longer than a moment.

gRPC holds a message in memory until the last byte of it is here. Most are here when their call is looked at,
and none of those waits for anything. What is not here a moment later needs a place, of which there are few:
so whoever sends the first megabytes of thousands of messages, and never the rest, has the memory of a few of
them, and keeps nobody from sending a whole one.
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
"""A message that is sent at all is here within this, unless it is large or the network slow."""
_WORK = (Kind.WORK, Kind.TOKENIZE)


class Receiving:
    """The places of one server. Used on its event loop only."""

    def __init__(self, most: int, limit_s: float, clock: Clock = time.monotonic) -> None:
        """`most` messages of work at once, of which one address may have half, and a few of each other kind;
        0 is any number of all. `limit_s`: how long one may take, in seconds; 0 is for ever.
        """
        self._limit_s = limit_s
        few = most and max(most // 8, 2)
        work = _gate(most, clock)
        self._gates = {kind: work if kind in _WORK else _gate(few, clock) for kind in Kind}

    def active(self, kind: Kind) -> int:
        """How many messages have a place."""
        return self._gates[kind].active

    async def message(self, kind: Kind, peer: str, read: Callable[[], Awaitable[T]]) -> T:
        """What `read()` gives. `peer` is as for `Admission`.

        Raises StalledSender where it takes too long, and Busy where too many others do.
        """
        loop = asyncio.get_running_loop()
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
            async with asyncio.timeout(self._limit_s or None) as deadline:
                return await read()
        except TimeoutError:
            raise refusal or StalledSender(self._limit_s) from None
        finally:
            timer.cancel()
            if leave is not None:
                leave()
            refusal = None  # its traceback has this frame


def _gate(most: int, clock: Clock) -> Gate:
    return Gate("max_receiving_rpcs", most, clock, per_address=(most + 1) // 2)
