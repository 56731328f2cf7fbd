"""What the front measures of itself, for Prometheus. Labels are bounded: endpoints by their route, and
statuses.
"""

from __future__ import annotations

import os
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

FOLDER_VARIABLE: Final = "PROMETHEUS_MULTIPROC_DIR"
"""Where workers keep their values in files, so that each can add up those of all. prometheus_client reads it
when it is imported; a front of one process does without.
"""
_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


class Meters:
    """The metrics of one worker."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests: Final = Counter(
            "penstock_openai_requests",
            "Requests that have ended, by endpoint and HTTP status; 499: the client went away.",
            ("endpoint", "status"),
            registry=self._registry,
        )
        self.seconds: Final = Histogram(
            "penstock_openai_request_seconds",
            "Time from a request's headers to the end of its reply.",
            ("endpoint",),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.first_byte_seconds: Final = Histogram(
            "penstock_openai_first_byte_seconds",
            "Time from a request's headers to the first byte of the body of its reply.",
            ("endpoint",),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.running: Final = Gauge(
            "penstock_openai_running_requests",
            "Requests that are being served.",
            registry=self._registry,
            multiprocess_mode="livesum",
        )
        self.connections: Final = Gauge(
            "penstock_openai_connections",
            "Open connections.",
            registry=self._registry,
            multiprocess_mode="livesum",
        )
        self.closed_connections: Final = Counter(
            "penstock_openai_closed_connections",
            "Connections that the front closed, by reason.",
            ("reason",),
            registry=self._registry,
        )

    def page(self) -> bytes:
        """The values of all workers in Prometheus' text format."""
        if FOLDER_VARIABLE not in os.environ:
            return generate_latest(self._registry)
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]  # ships no hints for it
        return generate_latest(registry)
