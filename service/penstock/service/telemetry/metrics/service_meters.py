"""Measures what the service does, into a registry of its own: it serves from before there is an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from penstock.runtime.measuring.registry import Histogram, Registry
from penstock.service.telemetry.metrics import service_instruments as defined

LAG_INTERVAL_S = 0.25
UNKNOWN_METHOD = "_OTHER"
"""OpenTelemetry's word for the methods that a server does not have."""


class ServiceMeters:
    """What the parts of the service tell as it happens. Any thread may use it."""

    def __init__(self, registry: Registry) -> None:
        self._calls = registry.histogram(defined.CALL_DURATION)
        self._refused = registry.counter(defined.REFUSED)
        self._lane_refused = registry.counter(defined.LANE_REFUSED)
        self._lane_time = registry.histogram(defined.LANE_TIME)

    def call_ended(self, method: str, code: str, seconds: float) -> None:
        """Count a call. `method` is one that the server has, or UNKNOWN_METHOD, so that there are few."""
        self._calls.record(seconds, labels=("grpc", method, code))

    def refused(self, reason: str) -> None:
        """Count an error of the table of errors."""
        self._refused.add(1, (reason,))

    def has_lanes(self, names: Iterable[str]) -> None:
        """Show these lanes from the start on, so that the rate of the first refusal can be seen."""
        for name in names:
            self._lane_refused.add(0, (name,))

    def lane_refused(self, lane: str) -> None:
        """Count work that a lane did not accept."""
        self._lane_refused.add(1, (lane,))

    def lane_done(self, lane: str, seconds: float) -> None:
        """Count work that a lane has done, in this time since it was given."""
        self._lane_time.record(seconds, labels=(lane,))


class LoopLag:
    """Measures how late timers of an event loop fire."""

    def __init__(self, registry: Registry) -> None:
        self._lag: Histogram = registry.histogram(defined.LOOP_LAG)
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin, on the event loop that is measured."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(LAG_INTERVAL_S, self._fired, loop, loop.time() + LAG_INTERVAL_S)

    def stop(self) -> None:
        """End. May be called without `start`."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fired(self, loop: asyncio.AbstractEventLoop, due_s: float) -> None:
        self._lag.record(max(0.0, loop.time() - due_s))
        self.start()
