"""What the service writes into the engine's journal about requests that are recorded, so that the thread
which makes their spans reads it in order with what the engine did.

`WallClock` tells what makes Unix times of the monotonic ones in these notes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import MappingProxyType
from typing import NamedTuple

from penstock.runtime.requests.request import RequestTiming
from penstock.service.telemetry.otlp.wire import Attributes

_NONE: Attributes = MappingProxyType({})
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
        """Compare the two clocks again, and return the difference that counts from now on."""
        offset_ns = self._unix_ns() - self._now_ns()
        if abs(offset_ns - self.offset_ns) >= _SMALLEST_STEP_NS:
            self.offset_ns = offset_ns
        return self.offset_ns


class RequestContext(NamedTuple):
    """Where the span of a request hangs."""

    trace_id: bytes
    span_id: bytes
    """Its own id."""
    parent_id: bytes
    """The id of the RPC's span."""
    trace_state: str
    wall_offset_ns: int
    """What makes Unix times of the monotonic ones of this request. It is one number for all of its spans, so
    that they move together when the clock is set.
    """


class Begun(NamedTuple):
    """A phase that began. It ends where the next one begins, or with the request."""

    name: str
    at_ns: int
    attributes: Attributes = _NONE


class Happened(NamedTuple):
    """Something that happened to a request at a moment."""

    name: str
    at_ns: int
    attributes: Attributes = _NONE


class Opened(NamedTuple):
    """A request that is recorded is about to be submitted."""

    context: RequestContext


class Closed(NamedTuple):
    """A request that is recorded has ended for its caller. This alone is enough for its span and its phases;
    what the engine did meanwhile adds details.
    """

    context: RequestContext
    name: str
    start_ns: int
    end_ns: int
    begun: tuple[Begun, ...]
    """The phases before the engine had the request; the first began with the request."""
    attributes: Attributes
    happened: tuple[Happened, ...]
    error: str
    """The name of the error that it failed with; empty if it did not fail."""
    num_queued: int
    """How many outputs the engine has taken."""
    timing: RequestTiming | None
    """What the engine said to the outputs that were read to their end; None if there are others."""
    num_tokens: int
    """Generated tokens that were read."""
