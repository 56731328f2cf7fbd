"""Pushes metrics to an OpenTelemetry collector from time to time, on a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from opentelemetry.sdk.metrics.export import MetricsData
from opentelemetry.sdk.resources import Resource

from penstock.runtime.measuring.snapshot import Snapshot
from penstock.service.telemetry.metrics.otlp_points import metrics_data

log = logging.getLogger(__name__)

SCOPE = "penstock"
"""Who measured, in OpenTelemetry's terms."""
_LAST_MOMENT_S = 0.5
"""How long the thread may take to notice that its exporter was closed."""


class MetricExporter(Protocol):
    """Sends metrics, and logs if they cannot be sent."""

    def export(self, metrics: MetricsData) -> bool:
        """Send metrics, and wait for the answer. Returns whether they were taken."""

    def hurry(self, within_s: float) -> None:
        """Try nothing twice from now on, and end the last attempt within this time. From any thread."""

    def close(self) -> None:
        """End for good, also an attempt that is under way. From any thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collector:
    """Where metrics are pushed to, and how often."""

    exporter: MetricExporter
    resource: Resource
    """What the metrics say about their sender."""
    interval_s: float


class Push:
    """Pushes what `read` returns. What could not be pushed is not lost: the next push has it, too."""

    def __init__(self, collector: Collector, read: Callable[[], Sequence[Snapshot]]) -> None:
        """`read` may block for a moment, and may raise. The first push is after one interval."""
        self._collector = collector
        self._read = read
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-push", daemon=True)

    def start(self) -> None:
        """Begin to push."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Push once more and end, within about `timeout_s` seconds. Blocks. May be called twice, and without
        `start`.
        """
        self._collector.exporter.hurry(timeout_s)
        self._ending.set()
        has_started = self._thread.ident is not None
        if has_started:
            self._thread.join(timeout_s)
        self._collector.exporter.close()
        if has_started:
            self._thread.join(_LAST_MOMENT_S)

    def _run(self) -> None:
        goes_on = True
        while goes_on:
            goes_on = not self._ending.wait(self._collector.interval_s)
            try:
                data = metrics_data(self._read(), self._collector.resource, SCOPE)
                self._collector.exporter.export(data)
            except Exception:  # the thread must outlive one snapshot that cannot be made
                log.exception("metrics cannot be pushed")
